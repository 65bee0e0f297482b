"""The Ray actor that a worker lives in. Light to import: what the worker computes with is imported with its class."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from typing import Any

from mrl.backends.served import Answer, Served

THREADS = "OMP_NUM_THREADS"
QUIET = "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC"
"""Ray warns of every blocking `ray.get` in an asynchronous actor; workers read weights on a thread of their own."""


class Host:
    """One worker. Ray delivers calls in any order, so each says which place it has among all that were sent.

    surroundings: of the process that runs the loop, where it is on the same machine or sees the same disk.
    """

    def __init__(self, name: str, surroundings: Mapping[str, Any] | None) -> None:
        os.environ.setdefault(QUIET, "0")
        if surroundings is not None:
            _take(surroundings)
        self.served = Served(name)
        self.next_place = 0
        self.waiting: dict[int, asyncio.Future[None]] = {}
        self.skipped: set[int] = set()

    async def answer(
        self, place: int, number: int, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Answer:
        """See Served."""
        await self._in_turn(place)
        return await self.served.answer(number, method, args, kwargs)

    async def give_up(self, place: int, number: int) -> None:
        """See Served."""
        await self._in_turn(place)
        self.served.give_up(number)

    async def skip(self, place: int) -> None:
        """The call of this place never arrives: its arguments could not be read here."""
        self.skipped.add(place)
        self._call_next()

    async def where(self) -> tuple[str, int]:
        """The id of the node it is on, and of its process there."""
        import ray

        return str(ray.get_runtime_context().get_node_id()), os.getpid()

    async def _in_turn(self, place: int) -> None:
        if place != self.next_place:
            turn = self.waiting[place] = asyncio.get_running_loop().create_future()
            await turn
            del self.waiting[place]
        self.next_place = place + 1
        self._call_next()

    def _call_next(self) -> None:
        while self.next_place in self.skipped:
            self.skipped.remove(self.next_place)
            self.next_place += 1
        waiting = self.waiting.get(self.next_place)
        if waiting is not None and not waiting.done():
            waiting.set_result(None)


def surroundings(*, own_machine: bool) -> dict[str, Any]:
    """What a worker takes over from this process. own_machine: it has all of this machine's processors, as this process
    has, instead of the number that Ray reserves."""
    return {"path": list(sys.path), "threads": (os.environ.get(THREADS),) if own_machine else None}


def _take(surroundings: Mapping[str, Any]) -> None:
    sys.path.extend(folder for folder in surroundings["path"] if folder not in sys.path)
    if surroundings["threads"] is not None:  # Ray has set it to the number of processors that it reserved
        (threads,) = surroundings["threads"]
        os.environ.pop(THREADS, None)
        if threads is not None:
            os.environ[THREADS] = threads
