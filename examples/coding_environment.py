"""Programming with a look at what programs print: the policy runs code in the sandbox, then hands in a solution.

It needs a model that calls tools.

python examples/coding_environment.py --model Qwen/Qwen2.5-Coder-1.5B-Instruct
"""

import argparse

from mrl import MRLTrainer
from mrl.environments.coding import Coding

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--max-steps", type=int, default=200)
    given = parser.parse_args()
    trainer = MRLTrainer(
        model=given.model,
        train_dataset=Coding.tasks(200),
        environment_factory=Coding,  # or "coding", or lambda: Coding(partial=False, seconds=5)
        max_turns=4,
        max_completion_length=512,
        max_steps=given.max_steps,
        batch_size=4,
        num_generations=4,
        learning_rate=1e-5,
    )
    result = trainer.train()
    print(f"{result.status} after {result.steps} steps: {result.run_dir}")
