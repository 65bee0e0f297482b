"""A policy is to learn to search: it guesses a number, is told "too small" or "too large", and guesses again.

A beginner that guesses anything is built first, in half a minute (`mrl.starter.beginner`); then it is trained on
whether it finds the number with five guesses, or with --step-rewards on what each guess rules out.

python examples/number_guessing.py
python examples/number_guessing.py --step-rewards --seed 1
"""

import argparse
import random
from pathlib import Path

from mrl import MRLTrainer
from mrl.starter.beginner import build_beginner, demonstrate

NUMBERS, GUESSES = 20, 5
PLAYERS = ("Ann", "Bob", "Cleo", "Dan", "Eve", "Finn", "Gina", "Hugo", "Iris", "Jack", "Kim", "Leo")
"""Who thinks of the number; the last four are held out."""


class Game:
    """The numbers that are left, and the guesses."""

    def reset(self, secret: int, **columns) -> None:
        self.secret, self.guesses, self.found = secret, 0, False
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
        before = len(self.left)
        if number == self.secret:
            self.found, self.left = True, set()
        else:
            self.left = {n for n in self.left if n != number and (n < number) == (self.secret < number)}
        self._earn((before - len(self.left)) / NUMBERS)
        return "right" if self.found else "too small" if number < self.secret else "too large"

    def _earn(self, reward: float) -> None:
        """Told of each guess what share of the numbers it rules out, or finds."""


class Outcome(Game):
    """With one reward: 1 for finding the number."""

    def get_reward(self) -> float:
        return float(self.found)


class Steps(Game):
    """With rewards for guesses alone. They add up to 1 if the number is found, and to less if not."""

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
    """Of somebody who does not listen."""
    game = Game()

    def move():
        return "done" if game.found else ("guess", {"number": rng.randint(1, NUMBERS)})

    rows = rng.choices(tasks(PLAYERS[:8]), k=count)
    return [demonstrate(game, row["prompt"], row, move, GUESSES) for row in rows]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lessons", type=int, default=200, help="steps of the supervised phase")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--step-rewards", action="store_true", help="rewards for each guess, and none at the end")
    options = parser.parse_args()

    beginner = Path("beginners") / f"number-guessing-{options.seed}"
    if not (beginner / "config.json").exists():
        games = careless_games(3000, random.Random(options.seed))
        build_beginner(beginner, games, [Game().guess], seed=options.seed, steps=options.lessons)
    result = MRLTrainer(
        model=str(beginner),
        train_dataset=tasks(PLAYERS[:8]),
        eval_dataset=2 * tasks(PLAYERS[8:]),
        eval_samples=None,
        environment_factory=Steps if options.step_rewards else Outcome,
        advantage_type="turn",  # a guess is judged by what follows from it
        discount=0.5 if options.step_rewards else 1.0,
        max_turns=GUESSES,
        max_completion_length=64,
        max_steps=options.steps,
        eval_steps=20,
        save_steps=0,
        batch_size=40,
        num_generations=4,
        learning_rate=1e-3,
        num_rollout_workers=1,
        weight_sync_method="direct",
        seed=options.seed,
    ).train()
    print(f"held-out games won: {result.eval_metrics['eval/pass_rate']:.0%} after {result.steps} steps")
