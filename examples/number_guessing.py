"""A policy learns to search: it guesses a number, is told "too small" or "too large", and guesses again.

A beginner that guesses anywhere in the range is built first, in half a minute (`mrl.starter.beginner`); then it is trained
on whether it finds the number within five guesses, or with --step-rewards on what each guess rules out.

python examples/number_guessing.py
python examples/number_guessing.py --step-rewards --seed 1
"""

import argparse
import random
from pathlib import Path
from tempfile import TemporaryDirectory

from mrl import MRLTrainer
from mrl.starter.beginner import LINES_NAMES_NUMBERS, build_beginner, demonstrate

NUMBERS = 20
"""In each range."""
GUESSES = 5
PLAYERS = ("Ann", "Bob", "Cleo", "Dan", "Eve", "Finn", "Gina", "Hugo", "Iris", "Jack", "Kim", "Leo")
"""Who thinks of the number; the last four are held out."""


class Guess:
    """The game, with a reward at its end."""

    def reset(self, secret: int, **columns) -> None:
        self.secret, self.found, self.guesses = secret, False, 0
        self.left = set(range(1, NUMBERS + 1))

    def guess(self, number: int) -> str:
        """
        Guesses the number.

        Args:
            number: The guess.
        """
        self.guesses += 1
        if self.guesses > GUESSES:  # a turn may hold several calls
            return "no more guesses"
        self.found |= number == self.secret
        if self.found:
            self.left = set()
            return "right"
        self.left = {n for n in self.left if n != number and (n < number) == (self.secret < number)}
        return "too small" if number < self.secret else "too large"

    def get_reward(self) -> float:
        return float(self.found)


class GuessByStep:
    """The same with rewards for each guess alone: the share of the numbers that it rules out, or finds."""

    step_reward = 0.0

    def __init__(self) -> None:
        self.game = Guess()

    def reset(self, **columns) -> None:
        self.game.reset(**columns)

    def guess(self, number: int) -> str:
        """
        Guesses the number.

        Args:
            number: The guess.
        """
        before = len(self.game.left)
        said = self.game.guess(number)
        self.step_reward += (before - len(self.game.left)) / NUMBERS
        return said


def tasks(players) -> list[dict]:
    return [
        {"prompt": f"{player} thinks of a number from 1 to {NUMBERS}.", "secret": secret}
        for player in players
        for secret in range(1, NUMBERS + 1)
    ]


def train_tasks():
    return tasks(PLAYERS[:8])


def eval_tasks():
    return 2 * tasks(PLAYERS[8:])


def tools():
    return [Guess().guess]


BEGINNER = {"pieces": LINES_NAMES_NUMBERS}


def careless_demonstrations(count: int, seed: int) -> list[list[dict]]:
    """Games of somebody who knows the numbers and hardly listens."""
    rng, game, rows = random.Random(seed), Guess(), tasks(PLAYERS)

    def move():
        listens = rng.random() < 0.1
        numbers = sorted(game.left) if listens else range(1, NUMBERS + 1)
        return "done" if game.found else ("guess", {"number": rng.choice(numbers)})

    return [demonstrate(game, row["prompt"], row, move, GUESSES) for row in rng.choices(rows, k=count)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--step-rewards", action="store_true", help="rewards for each guess, and none at the end")
    options = parser.parse_args()
    held_out = LOWEST[2::5]
    trained = [low for low in LOWEST if low not in held_out]
    with TemporaryDirectory() as folder:
        games = random_games(trained, 3000, options.seed)
        beginner = build_beginner(Path(folder), games, [Guess().guess], seed=options.seed)
        result = MRLTrainer(
            model=str(beginner),
            train_dataset=tasks(trained),
            eval_dataset=tasks(held_out),
            eval_samples=None,
            environment_factory=GuessByStep if options.step_rewards else Guess,
            advantage_type="turn",
            discount=0.5 if options.step_rewards else 1.0,
            max_turns=GUESSES,
            max_completion_length=64,
            max_steps=options.steps,
            eval_steps=max(1, options.steps // 10),
            save_steps=0,
            batch_size=32,
            num_generations=8,
            learning_rate=1e-3,
            lr_scheduler_type="linear",
            num_rollout_workers=1,
            weight_sync_method="direct",
            seed=options.seed,
        ).train()
    print(f"held-out games won: {result.eval_metrics['eval/pass_rate']:.0%} after {result.steps} steps")
