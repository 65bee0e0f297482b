"""`inline`: workers are objects in this process. The embedded default, and where a debugger works."""

from __future__ import annotations

import asyncio
import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

from mrl.backends.base import Resources
from mrl.errors import WorkerDied
from mrl.system.threads import InTurn

ENDING_SECONDS = 10.0
"""How long a worker that is ended may still take over the call it is in."""


class InlineHandle:
    """A worker object. Its blocking methods run on another thread, one at a time: the event loop stays free.

    The thread ends when no call is left, and its share of torch's threads with it (see mrl.system.threads).
    """

    def __init__(self, worker: Any, name: str, timeout: float) -> None:
        self.worker: Any | None = worker
        self.name = name
        self.timeout = timeout
        self.calls = InTurn(f"mrl-{name}")

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if self.worker is None:
            raise WorkerDied(f"{self.name}: was ended and cannot answer {method}()")
        bound = getattr(self.worker, method)
        deadline = asyncio.timeout(self.timeout)
        try:
            async with deadline:
                if inspect.iscoroutinefunction(bound):
                    return await bound(*args, **kwargs)
                work = functools.partial(bound, *args, **kwargs)
                return await asyncio.wrap_future(self.calls.submit(method, work))
        except TimeoutError:
            if not deadline.expired():  # the method's own
                raise
            running = self.calls.running
            behind = f" (it waited for {running}(), which still runs)" if running not in (None, method) else ""
            raise WorkerDied(
                f"{self.name}: {method}() did not finish in {self.timeout:.0f} s{behind}; raise call_timeout if it "
                "needs longer"
            ) from None

    async def kill(self) -> None:
        """End it: it is closed once the call it is in has ended, never during it. One that hangs is left behind, with
        a warning; it keeps neither its caller nor the process from ending."""
        worker, self.worker = self.worker, None
        if worker is None:
            return
        self.calls.drop_waiting()
        ended = asyncio.wrap_future(self.calls.submit("ending", _nothing))
        close: Callable[[], Any] = getattr(worker, "close", _nothing)
        closed = None if inspect.iscoroutinefunction(close) else self.calls.submit("close", close)
        await asyncio.wait([ended], timeout=ENDING_SECONDS)
        if not ended.done():
            ended.cancel()
            warnings.warn(
                f"{self.name}: {self.calls.running}() still runs {ENDING_SECONDS:.0f} s after its worker was ended; it "
                "is left behind, and the worker is closed when it returns, if ever",
                RuntimeWarning,
                stacklevel=2,
            )
        elif closed is None:
            await close()
        else:
            await asyncio.wrap_future(closed)

    async def alive(self) -> bool:
        return self.worker is not None


def _nothing() -> None:
    """Its turn comes when what was before it has ended."""


class InlineBackend:
    """Everything in this process, on the device that is there."""

    shares_memory = True

    def __init__(self, call_timeout: float) -> None:
        self.call_timeout = call_timeout
        self.handles: list[InlineHandle] = []

    async def spawn(self, worker: type, *, name: str, resources: Resources, args: dict[str, Any]) -> InlineHandle:
        handle = InlineHandle(worker(**args), name, self.call_timeout)
        self.handles.append(handle)
        return handle

    async def close(self) -> None:
        for handle in self.handles:
            await handle.kill()
        self.handles.clear()
