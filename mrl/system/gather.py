"""Coroutines at once, and none left behind; and whether a cancellation is one's own."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def all_of(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Every result, in order. When one fails, or the caller is cancelled, the others are cancelled and have ended when
    this raises."""
    tasks = [asyncio.ensure_future(part) for part in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        unfinished = [task for task in tasks if not task.done()]
        for task in unfinished:
            task.cancel()
        if unfinished:
            await asyncio.gather(*unfinished, return_exceptions=True)


def is_being_cancelled() -> bool:
    """Whether somebody cancels the current task. If not, a CancelledError in it is another task's, which it awaited."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
