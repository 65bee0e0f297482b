"""Simple mode: one of TRL's own trainers does the training; options, data, rewards, record and checkpoints are mrl's.

    train_simple(model="starter", dataset_name="tiny-code", algorithm="grpo", top_p=1.0, max_steps=10)

`trainers.py` names TRL's trainers and the data each needs, `options.py` says what every option of mrl means to them,
`worker.py` is the trainer as one worker of plain data, `run.py` starts it and keeps the record.
"""
