"""Tools and environments of the runs in these tests, as a user has them in a file."""

from __future__ import annotations

from typing import Any


def double(number: int) -> int:
    """
    Doubles a number.

    Args:
        number: Which.
    """
    return 2 * number


class Guess:
    """A number from 0 to 3 is to be guessed."""

    def reset(self, secret: int = 2, **_: Any) -> str:
        self.secret, self.guesses, self.found = secret, 0, False
        return " Guess a number from 0 to 3."

    def guess(self, number: int) -> str:
        """
        Guesses the number.

        Args:
            number: The guess.
        """
        self.guesses += 1
        self.found |= number == self.secret
        return "right" if self.found else "too small" if number < self.secret else "too large"

    def get_reward(self) -> float:
        return float(self.found)


def guess_call(number: int) -> str:
    return f'<tool_call>\n{{"name": "guess", "arguments": {{"number": {number}}}}}\n</tool_call>'
