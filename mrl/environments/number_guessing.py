"""`number_guessing`: a number is to be found by what is said about guesses. For experiments with several turns."""

from __future__ import annotations

from random import Random
from typing import Any

from mrl.environments.base import playing, rows, seeded, setting
from mrl.errors import DataError


class NumberGuessing:
    """Too small, too large, right."""

    def __init__(self, low: int = 1, high: int = 100, guesses: int = 10, partial: float = 0.0) -> None:
        """low, high: the least and the greatest number. guesses: how many there are. partial: what being as near as
        can be without having found it is worth; each guess that is nearer than those before adds to the reward."""
        self.defaults = (low, high, guesses, partial)
        self.found = self.done = False

    def reset(
        self,
        seed: int | None = None,
        secret: int | None = None,
        low: int | None = None,
        high: int | None = None,
        guesses: int | None = None,
        partial: float | None = None,
        **columns: Any,
    ) -> str:
        """secret: default, one that follows from `seed`. Raises DataError."""
        self.low = setting(low, self.defaults[0])
        self.high = setting(high, self.defaults[1])
        self.left = setting(guesses, self.defaults[2])
        self.partial = setting(partial, self.defaults[3])
        if not self.low < self.high or self.left < 1 or not 0 <= self.partial <= 1:
            raise DataError(
                f"number_guessing: low {self.low}, high {self.high}, guesses {self.left}, partial {self.partial}; low "
                "has to be less than high, guesses at least 1, partial from 0 to 1"
            )
        if secret is None:
            secret = Random(seeded(seed, " and no 'secret'")).randint(self.low, self.high)
        if not self.low <= secret <= self.high:
            raise DataError(f"number_guessing: the secret {secret} is not from {self.low} to {self.high}")
        self.secret, self.nearest = secret, self.high - self.low
        self.found = self.done = False
        return f"\nFind the number from {self.low} to {self.high}. You have {self.left} guesses."

    def guess(self, number: int) -> str:
        """
        Guesses the number.

        Args:
            number: The guess.
        """
        playing(self.done)
        number = int(number)
        self.left -= 1
        self.nearest = min(self.nearest, abs(number - self.secret))
        self.found = number == self.secret
        self.done = self.found or self.left == 0
        if self.found:
            return "right"
        return f"too {'small' if number < self.secret else 'large'}, {self.left} left"

    def get_reward(self) -> float:
        """1 when it was found, else `partial` times how near the nearest guess came."""
        return 1.0 if self.found else self.partial * (1 - self.nearest / (self.high - self.low))

    @classmethod
    def tasks(cls, count: int, seed: int = 0) -> list[dict[str, Any]]:
        """Rows of a dataset."""
        return rows("Play a game: guess a number with the tool `guess`.", count, seed)
