"""Several workers that do everything together, such as the ranks of a distributed actor, behind one handle."""

from __future__ import annotations

import asyncio
from typing import Any

from mrl.backends import base
from mrl.backends.base import WorkerHandle
from mrl.errors import MRLError, WorkerDied
from mrl.system.gather import all_of

FOLLOWING_SECONDS = 5.0
"""How long the other ranks may go on with a call after one has failed in it: in a collective operation they wait for it
for ever, but what fails on all of them fails everywhere at about the same time."""


class Ranks:
    """Every call runs on each rank with the same arguments; rank 0's answer is the call's.

    A call that fails on a rank fails: with WorkerDied if a rank has died, else with the error of the first that failed,
    which names the rank. Ranks that are still in the call then, waiting for the failed one, are of no use any more: all
    are ended.
    """

    def __init__(self, name: str, ranks: list[WorkerHandle]) -> None:
        self.name, self.ranks = name, ranks
        self.ended: str | None = None
        """Why there are no ranks any more."""

    async def call(self, method: str, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """See WorkerHandle."""
        if self.ended is not None:
            raise WorkerDied(f"{self.name}: {self.ended}, so it cannot answer {method}()", self.name)
        calls = [asyncio.create_task(rank.call(method, *args, timeout=timeout, **kwargs)) for rank in self.ranks]
        failed: list[int] = []  # in the order in which they did

        def ended(call: asyncio.Task[Any]) -> None:
            if not call.cancelled() and call.exception() is not None:
                failed.append(calls.index(call))

        for call in calls:
            call.add_done_callback(ended)
        try:
            await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
            if failed:
                await asyncio.wait(calls, timeout=FOLLOWING_SECONDS)
        finally:  # cancelled as well
            running = [rank for rank, call in enumerate(calls) if not call.done()]
            for rank in running:
                calls[rank].cancel()
            if running:
                await asyncio.wait([calls[rank] for rank in running], timeout=base.ENDING_SECONDS)
        if not failed:
            return calls[0].result()
        errors = {rank: calls[rank].exception() for rank in failed}
        dead = next((rank for rank, error in errors.items() if isinstance(error, WorkerDied)), None)
        if dead is not None or running:
            await self._end(f"rank {failed[0] if dead is None else dead} failed in {method}()")
        if dead is not None:
            raise WorkerDied(f"{self.name}, rank {dead} of {len(self.ranks)}: {errors[dead]}", self.name)
        raise self._named(failed[0], errors[failed[0]])

    async def kill(self) -> None:
        """End every rank."""
        await self._end("was ended")

    async def alive(self) -> bool:
        """Whether every rank answers."""
        return self.ended is None and all(await all_of([rank.alive() for rank in self.ranks]))

    async def _end(self, why: str) -> None:
        self.ended = self.ended or why
        await all_of([rank.kill() for rank in self.ranks])

    def _named(self, rank: int, error: BaseException | None) -> BaseException:
        """The error, saying where it comes from: ours in their message, others in a note under theirs."""
        assert error is not None
        where = f"{self.name}, rank {rank} of {len(self.ranks)}"
        if isinstance(error, MRLError):
            error.args = (f"{where}: {error}", *error.args[1:])
        else:
            error.add_note(f"raised on {where}")
        return error
