"""A rollout function: all rollouts of a step in one call, as TRL's trainers take it. Takes a minute on two CPU cores.

python examples/rollout_func.py
"""

import argparse

from mrl import MRLTrainer
from mrl.rollouts.function import generate_rollout_completions

TASKS = [
    {"prompt": f"Write a function f(a, b) that returns {a} times a plus {b} times b.", "numbers": [a, b]}
    for a in range(2, 10)
    for b in range(2, 10)
]


class Reader:
    """The environment: it reads a program and says how much of the task it recognises."""

    def reset(self):
        self.read = 0

    def step(self, program):
        self.read += 1
        return sum(word in program for word in ("def f", "return", "*", "+")) / 4


reader = Reader()


def rollout(prompts, trainer):
    """Each prompt comes as often as it wants rollouts; every list that is returned has one entry for each."""
    prompts = [[{"role": "user", "content": prompt}] for prompt in prompts]
    answers = generate_rollout_completions(trainer, prompts)
    reader.reset()
    return {
        "prompt_ids": [answer["prompt_ids"] for answer in answers],
        "completion_ids": [answer["completion_ids"] for answer in answers],
        "logprobs": [answer["logprobs"] for answer in answers],
        "policy_versions": [answer["policy_versions"] for answer in answers],
        "recognised": [reader.step(answer["text"]) for answer in answers],
    }


def from_environment(completions, recognised, **kwargs):
    """Further lists of the function are arguments of reward functions."""
    return [share if len(text) < 200 else 0.0 for text, share in zip(completions, recognised, strict=True)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-steps", type=int, default=30)
    parser.add_argument("--serve", default="127.0.0.1:0")
    given = parser.parse_args()
    trainer = MRLTrainer(
        model="starter",
        train_dataset=TASKS,
        rollout_func=rollout,
        reward_funcs=from_environment,
        serve=given.serve,
        max_steps=given.max_steps,
        max_completion_length=64,
        learning_rate=3e-4,
        num_rollout_workers=1,
        weight_sync_method="direct",
    )
    result = trainer.train()
    print(f"reward {result.metrics['reward/mean']:.2f} after {result.steps} steps; see {result.run_dir}/reward.png")
