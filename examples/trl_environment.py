"""A script as one writes it for TRL's GRPOTrainer: only the first import is another one.

    python examples/trl_environment.py --model Qwen/Qwen3-0.6B

docs/trl-scripts.md says what TRL's options become.
"""

import argparse
import random

from datasets import Dataset

from mrl.trl import GRPOConfig, GRPOTrainer


class HotAndCold:
    """A hidden number, and a tool that says whether a guess is too small or too large."""

    def reset(self, secret: int, **columns) -> str:
        self.secret, self.guesses, self.found = secret, 0, False
        return " Guess the number between 1 and 20; you have five guesses."

    def guess(self, number: int) -> str:
        """
        Guesses the hidden number.

        Args:
            number: The guess.

        Returns:
            Whether it is right, too small or too large.
        """
        if self.found or self.guesses == 5:
            raise ValueError("the game is over")
        self.guesses += 1
        self.found = number == self.secret
        return "right" if self.found else "too small" if number < self.secret else "too large"


def solved(environments, **kwargs):
    return [float(environment.found) for environment in environments]


def few_guesses(environments, **kwargs):
    return [0.5 - 0.1 * environment.guesses if environment.found else 0.0 for environment in environments]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
    parser.add_argument("--output-dir", default=None)
    parser.add_argument("--max-steps", type=int, default=100)
    given = parser.parse_args(arguments)
    draw = random.Random(0)
    rows = {"prompt": [[{"role": "user", "content": "Let us play."}]] * 200, "secret": [0] * 200}
    rows["secret"] = [draw.randint(1, 20) for _ in rows["secret"]]
    trainer = GRPOTrainer(
        model=given.model,
        reward_funcs=[solved, few_guesses],
        train_dataset=Dataset.from_dict(rows),
        args=GRPOConfig(
            output_dir=given.output_dir,
            max_steps=given.max_steps,
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=256,
            max_tool_calling_iterations=5,
            chat_template_kwargs={"enable_thinking": False},
            logging_steps=1,
        ),
        environment_factory=HotAndCold,
    )
    result = trainer.train()
    trainer.save_model()
    return result


if __name__ == "__main__":
    main()
