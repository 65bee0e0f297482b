"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): groups that teach nothing are replaced by further ones.

What is attempted depends on rewards alone, which depend on the seed alone, and every attempt moves the data cursor that
checkpoints hold: a resumed run attempts what an uninterrupted one would have.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable


async def refill(
    count: Callable[[], int], target: int, rounds: int, attempt: Callable[[int, int], Awaitable[None]]
) -> int:
    """Call `attempt(missing, round)`, at most `rounds` times, until `count()` reaches `target`. Returns rounds used.

    Rounds count from 1.
    """
    for number in range(1, rounds + 1):
        missing = target - count()
        if missing <= 0:
            return number - 1
        await attempt(missing, number)
    return rounds
