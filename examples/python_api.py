"""The smallest complete run in Python: a model, tasks, a reward. Takes half a minute on two CPU cores.

python examples/python_api.py
"""

import argparse

from mrl import MRLTrainer

TASKS = [
    {"prompt": f"Write a function f(a, b) that returns {a} times a plus {b} times b.", "limit": 60}
    for a in range(2, 10)
    for b in range(2, 10)
]


def names_its_numbers(completions, prompts, limit, log_metric, **kwargs):
    """Share of the prompt's numbers that the program mentions; 0 for a program longer than `limit` characters."""
    rewards = []
    for text, prompt, longest in zip(completions, prompts, limit, strict=True):
        numbers = [word for word in prompt.split() if word.isdigit()]
        share = sum(number in text for number in numbers) / len(numbers)
        rewards.append(share if len(text) <= longest else 0.0)
    log_metric("length_mean", sum(map(len, completions)) / len(completions))
    return rewards


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-steps", type=int, default=30)
    steps = parser.parse_args().max_steps
    trainer = MRLTrainer(
        model="starter",
        train_dataset=TASKS,
        reward_funcs=names_its_numbers,
        max_steps=steps,
        max_completion_length=64,
        learning_rate=3e-4,
        num_rollout_workers=1,
        weight_sync_method="direct",
    )
    result = trainer.train()
    print(f"reward {result.metrics['reward/mean']:.2f} after {result.steps} steps; see {result.run_dir}/reward.png")
