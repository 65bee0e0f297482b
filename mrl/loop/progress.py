"""What a run waits for, shown while it waits: tokens sampled so far, then scoring."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

from mrl.backends import WorkerHandle
from mrl.errors import MRLError
from mrl.tracking import TrackerSet

EVERY_SECONDS = 0.5


@contextlib.asynccontextmanager
async def showing_progress(
    trackers: TrackerSet, workers: Sequence[WorkerHandle], generates: Callable[[], bool], name: str = "generating"
) -> AsyncIterator[None]:
    """Within it, trackers that show phases are told `name` with the tokens sampled since, or `scoring`.

    generates: whether anything is being sampled now.
    """
    trackers.phase(name)
    if not trackers.shows_phases:
        yield
        return
    telling = asyncio.create_task(_tell(trackers, workers, generates, name))
    try:
        yield
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)  # what a display stumbles over is no reason to lose a run


async def _tell(
    trackers: TrackerSet, workers: Sequence[WorkerHandle], generates: Callable[[], bool], name: str
) -> None:
    before = await _sampled(workers)
    while True:
        await asyncio.sleep(EVERY_SECONDS)
        if not generates():
            trackers.phase("scoring")
            continue
        tokens = await _sampled(workers) - before
        trackers.phase(name, f"{tokens:,} tokens" if tokens > 0 else "")


async def _sampled(workers: Sequence[WorkerHandle]) -> int:
    """Tokens that the workers' engines have sampled in all, as far as they count them."""
    total = 0
    for worker in list(workers):
        with contextlib.suppress(MRLError):  # it is gone, or being replaced: whoever uses it deals with that
            total += await worker.call("sampled_tokens") or 0
    return total
