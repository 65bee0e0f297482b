"""A handle to a worker in another process, whatever carries the calls: the worker's side is in mrl.backends.served."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Mapping
from typing import Any, Protocol

from mrl.backends import base
from mrl.backends.served import START, Answer, registrations
from mrl.errors import WorkerDied


class Gone(Exception):
    """The worker does not answer any more; the text says why, as in "its process died"."""


class Link(Protocol):
    """What carries calls to one worker. Implemented once per technology."""

    async def ask(self, number: int, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Answer:
        """Have the worker's `Served.answer` make a call. Calls are sent in the order in which they are asked. Raises
        Gone, also when the worker ends meanwhile, and ConfigError for arguments that cannot be sent."""
        ...

    async def give_up(self, number: int) -> None:
        """Have `Served.give_up` cancel a call, whose `ask` then returns. Raises Gone."""
        ...

    async def end(self) -> None:
        """End the worker now, whatever it does, and every `ask` with Gone. Calling it twice is allowed."""
        ...

    async def alive(self) -> bool:
        """Whether the worker is there, as far as the technology knows."""
        ...


class RemoteHandle:
    """See WorkerHandle. timeout: the backend's `call_timeout`."""

    def __init__(self, name: str, link: Link, timeout: float) -> None:
        self.name, self.link, self.timeout = name, link, timeout
        self.numbers = itertools.count()
        self.gone: str | None = None
        """Why it does not answer any more."""

    async def start(self, worker: type, args: dict[str, Any]) -> None:
        """Make the worker, where everything registered in this process is registered too. Raises what its constructor
        raises."""
        await self.call(START, registrations(), worker, args)

    async def call(self, method: str, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """See WorkerHandle."""
        if self.gone is not None:
            raise WorkerDied(f"{self.name}: {self.gone} and cannot answer {method}()", self.name)
        seconds = self.timeout if timeout is None else timeout
        number = next(self.numbers)
        asked = asyncio.create_task(self.link.ask(number, method, args, kwargs))
        try:
            await asyncio.wait({asked}, timeout=seconds)
        except asyncio.CancelledError:
            await self._give_up(number, asked)
            raise
        if asked.done():
            return self._result(asked, method or "start")
        running = await self._give_up(number, asked)
        self.gone = self.gone or "missed a deadline"
        behind = f" (it waited for {running}(), which still runs)" if running not in (None, method) else ""
        advice = "; raise call_timeout if it needs longer" if timeout is None else ""
        raise WorkerDied(
            f"{self.name}: {method or 'start'}() did not finish in {seconds:.0f} s{behind}{advice}", self.name
        )

    def _result(self, asked: asyncio.Task[Answer], method: str) -> Any:
        try:
            kind, value = asked.result()
        except Gone as error:
            self.gone = self.gone or str(error)
            raise WorkerDied(f"{self.name}: {self.gone} during {method}()", self.name) from None
        if kind == "cancelled":
            raise WorkerDied(f"{self.name}: gave up during {method}()", self.name)
        if kind == "raised":
            raise value
        return value

    async def _give_up(self, number: int, asked: asyncio.Task[Answer]) -> str | None:
        """Have the worker give up a call. Returns once it has: what it is in then, which cannot be given up."""
        if not asked.done():
            with contextlib.suppress(Gone, TimeoutError):
                await asyncio.wait_for(self.link.give_up(number), base.ENDING_SECONDS)
            await asyncio.wait({asked}, timeout=base.ENDING_SECONDS)
        if not asked.done():
            asked.cancel()
            return None
        if asked.exception() is not None:  # nobody asks for it any more
            return None
        kind, running = asked.result()
        return running if kind == "cancelled" else None

    async def kill(self) -> None:
        """See WorkerHandle. Lets the worker close itself, for a moment."""
        if self.gone is None:
            with contextlib.suppress(Exception):
                await self.call("close", timeout=base.ENDING_SECONDS)
        self.gone = self.gone or "was ended"
        await self.link.end()

    async def alive(self) -> bool:
        """See WorkerHandle."""
        return self.gone is None and await self.link.alive()
