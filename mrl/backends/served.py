"""A worker that is called from another process: that process's side is in mrl.backends.remote.

What carries the calls (a socket, Ray, Modal) is a backend's own. What a call means, when it ends, and which error it
raises is here, and so the same everywhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import traceback
from collections.abc import Mapping
from typing import Any, Literal

import cloudpickle

from mrl import registry
from mrl.system.threads import SerialExecutor

START = ""
"""The first call: what was registered, the worker's class, the arguments of its constructor."""

Answer = tuple[Literal["returned", "raised", "cancelled"], Any]
"""What came of a call: its value; its error; or, of one that was given up, the blocking method that still runs."""


class Served:
    """One worker. Its asynchronous methods run side by side on the event loop, blocking ones in turn on a thread."""

    def __init__(self, name: str) -> None:
        self.worker: Any = None
        self.blocking = SerialExecutor(f"mrl-{name}")
        self.calls: dict[int, asyncio.Task[Answer]] = {}

    async def answer(self, number: int, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Answer:
        """Make a call. number: of all calls to this worker, for `give_up`. Never raises."""
        call = self.calls[number] = asyncio.create_task(self._answer(method, args, kwargs))
        try:
            await asyncio.wait({call})
        finally:  # also when what carries the calls gives this one up
            call.cancel()
            del self.calls[number]
        return ("cancelled", self.blocking.running) if call.cancelled() else call.result()

    def give_up(self, number: int) -> None:
        """Cancel a call: an asynchronous method, or a blocking one that has not begun. Its answer says so."""
        if number in self.calls:
            self.calls[number].cancel()

    async def _answer(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Answer:
        try:
            return "returned", await self._call(method, args, kwargs)
        except asyncio.CancelledError:
            return "cancelled", self.blocking.running
        except BaseException as error:  # of `exit()` as well: the worker answers on
            return "raised", that_travels(error)

    async def _call(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if method == START:
            return self._start(*args)
        if method == "close" and not hasattr(self.worker, "close"):
            return None
        bound = getattr(self.worker, method)
        if asyncio.iscoroutinefunction(bound):
            return await bound(*args, **kwargs)
        return await asyncio.wrap_future(self.blocking.submit(method, functools.partial(bound, *args, **kwargs)))

    def _start(self, registered: list[tuple[str, str, bytes]], worker: type, args: dict[str, Any]) -> None:
        for kind, name, member in registered:
            registry.adopt({kind: {name: cloudpickle.loads(member)}})
        self.worker = worker(**args)


def registrations() -> list[tuple[str, str, bytes]]:
    """What was registered in this process and can travel: who asks for another one is told that it is not there."""
    found = []
    for kind, members in registry.registrations().items():
        for name, member in members.items():
            with contextlib.suppress(Exception):
                found.append((kind, name, cloudpickle.dumps(member)))
    return found


def that_travels(error: BaseException) -> BaseException:
    """The error, if it comes out of a pickle as it went in, else one that says what it was. Its note has the lines
    where it was raised."""
    lines = "".join(traceback.format_exception(error))
    try:
        copied = cloudpickle.loads(cloudpickle.dumps(error))
        if type(copied) is not type(error) or str(copied) != str(error):
            raise TypeError("it changed")
    except Exception as problem:
        error = RuntimeError(f"{type(error).__name__}: {error} (the error itself does not travel: {problem})")
    error.add_note(f"in the worker:\n{lines}")
    return error
