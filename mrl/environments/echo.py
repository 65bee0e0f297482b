"""`echo`: what the policy says comes back. The smallest environment that has all parts of one."""

from __future__ import annotations

from random import Random
from typing import Any

from mrl.environments.base import playing, rows, seeded

WORDS = ("apple", "blue", "cloud", "door", "east", "flute", "green", "house", "iron", "jump", "kite", "lamp")


class Echo:
    """A phrase is to be said."""

    def __init__(self, words: int = 3) -> None:
        """words: of a phrase, where the task does not give one."""
        self.words = words
        self.phrase, self.done = "", False

    def reset(self, seed: int | None = None, phrase: str | None = None, **columns: Any) -> str:
        """phrase: default, one that follows from `seed`."""
        if phrase is None:
            phrase = " ".join(Random(seeded(seed, " and no 'phrase'")).choices(WORDS, k=self.words))
        self.phrase, self.done = phrase, False
        return f"\nSay with the tool `echo`: {phrase}"

    def echo(self, message: str) -> str:
        """
        Says something, which comes back.

        Args:
            message: What is said.
        """
        playing(self.done)
        self.done = message.strip() == self.phrase
        return message

    def get_reward(self) -> float:
        """1 when the phrase was said."""
        return float(self.done)

    @classmethod
    def tasks(cls, count: int, seed: int = 0) -> list[dict[str, Any]]:
        """Rows of a dataset."""
        return rows("Repeat a phrase.", count, seed)
