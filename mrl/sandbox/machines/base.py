"""What a service that rents out machines has to offer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol


class Machine(Protocol):
    """One machine on which one command runs, without a network, for programs that nobody trusts."""

    async def write(self, data: bytes) -> None:
        """To the command's stdin. Raises any exception when that is no longer possible."""
        ...

    async def read(self) -> bytes:
        """Some of the command's stdout as soon as there is any; empty at its end. May raise instead."""
        ...

    async def stop(self) -> None:
        """Give the machine back, whatever runs on it. Called once; need not wait."""
        ...


OpenMachine = Callable[[list[str]], Awaitable[Machine]]
"""Starts a fresh machine that has Python 3.11 or newer as `python3`, and the given command on it."""
