"""A policy is to learn to search: it guesses a number, is told "too small" or "too large", and guesses again.

A beginner that listens at times is built first, in half a minute (`mrl.starter.beginner`); then it is trained on
whether it finds the number with three guesses, or with --step-rewards on what each guess rules out or finds.

python examples/number_guessing.py
python examples/number_guessing.py --step-rewards --seed 1
"""

import argparse
import random
from pathlib import Path

from mrl import MRLTrainer
from mrl.starter.beginner import build_beginner, demonstrate

NUMBERS, GUESSES = 7, 3
"""As many guesses as always find the number, for who guesses the middle of what is left."""
PLAYERS = ("Ann", "Bob", "Cleo", "Dan", "Eve", "Finn", "Gina", "Hugo", "Iris", "Jack", "Kim", "Leo")
"""Who thinks of the number; the beginner knows all of them, and the last four are held out of its training."""
LISTENS, GIVES_UP = 0.5, 0.25
"""How often those listen, and give up, whom the beginner imitates."""


class Game:
    """The number, those that are left, and the guesses."""

    def reset(self, secret: int, **columns) -> None:
        self.secret, self.guesses, self.last, self.found = secret, 0, 0, False
        self.left = list(range(1, NUMBERS + 1))

    def guess(self, number: int) -> str:
        """
        Guesses the number.

        Args:
            number: The guess.
        """
        if self.found or self.guesses == GUESSES:  # a turn may hold several calls, and what is found pays once
            return "the game is over"
        self.guesses += 1
        self.last = number
        if number == self.secret:
            self.found = True
            self._earn(1.0)
            return "right"
        before, small = len(self.left), number < self.secret
        self.left = [n for n in self.left if (n > number if small else n < number)]
        self._earn(0.2 * (before - len(self.left)) / before)
        return "too small" if small else "too large"

    def _earn(self, reward: float) -> None:
        """Told of each guess what it is worth: 1 if it is right, else a fifth of the share of the numbers left that it
        rules out."""


class Outcome(Game):
    """With one reward: 1 for finding the number."""

    def get_reward(self) -> float:
        return float(self.found)


class Steps(Game):
    """With rewards for guesses alone. They add up to 1 or more if the number is found, and to less if not."""

    step_reward = 0.0

    def _earn(self, reward: float) -> None:
        self.step_reward += reward


def tasks(players) -> list[dict]:
    return [
        {"prompt": f"{player} thinks of a number from 1 to {NUMBERS}.", "secret": secret}
        for player in players
        for secret in range(1, NUMBERS + 1)
    ]


def careless_games(count: int, rng: random.Random) -> list[list[dict]]:
    """Of somebody who listens half of the time, and guesses the middle of what is left; else goes the wrong way."""
    game = Game()

    def move():
        if game.found or rng.random() < GIVES_UP:
            return "done"
        if rng.random() < LISTENS:
            return "guess", {"number": game.left[len(game.left) // 2]}
        if game.guesses and game.last < game.secret:
            return "guess", {"number": rng.randint(1, game.last)}
        return "guess", {"number": rng.randint(max(game.last, 1), NUMBERS)}

    rows = rng.choices(tasks(PLAYERS), k=count)
    return [demonstrate(game, row["prompt"], row, move, GUESSES) for row in rows]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lessons", type=int, default=300, help="steps of the supervised phase")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--step-rewards", action="store_true", help="rewards for each guess, and none at the end")
    options = parser.parse_args()

    beginner = Path("beginners") / "number-guessing"
    if not (beginner / "config.json").exists():
        games = careless_games(6000, random.Random(0))
        build_beginner(beginner, games, [Game().guess], steps=options.lessons)
    result = MRLTrainer(
        model=str(beginner),
        train_dataset=tasks(PLAYERS[:8]),
        eval_dataset=8 * tasks(PLAYERS[8:]),
        eval_samples=None,
        environment_factory=Steps if options.step_rewards else Outcome,
        max_turns=GUESSES,
        max_completion_length=64,
        max_steps=options.steps,
        eval_steps=15,
        save_steps=0,
        batch_size=16,
        num_generations=8,
        learning_rate=1e-3,
        num_rollout_workers=1,
        weight_sync_method="direct",
        seed=options.seed,
    ).train()
    print(f"held-out games won: {result.eval_metrics['eval/pass_rate']:.0%} after {result.steps} steps")
