"""`inline`: workers are objects in this process. The embedded default, and where a debugger works."""

from __future__ import annotations

import asyncio
import inspect
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mrl.backends.base import Resources
from mrl.errors import WorkerDied


class InlineHandle:
    """A worker object. Its blocking methods run on a thread of its own, one at a time: the event loop stays free."""

    def __init__(self, worker: Any, name: str, timeout: float) -> None:
        self.worker: Any | None = worker
        self.name = name
        self.timeout = timeout
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"mrl-{name}")

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if self.worker is None:
            raise WorkerDied(f"{self.name}: was ended and cannot answer {method}()")
        bound = getattr(self.worker, method)
        deadline = asyncio.timeout(self.timeout)
        try:
            async with deadline:
                if inspect.iscoroutinefunction(bound):
                    return await bound(*args, **kwargs)
                return await asyncio.wrap_future(self.thread.submit(bound, *args, **kwargs))
        except TimeoutError:
            if not deadline.expired():  # the method's own
                raise
            raise WorkerDied(
                f"{self.name}: {method}() did not finish in {self.timeout:.0f} s; raise call_timeout if it needs longer"
            ) from None

    async def kill(self) -> None:
        worker, self.worker = self.worker, None
        close = getattr(worker, "close", None)
        if close is not None:
            result = close()
            if inspect.isawaitable(result):
                await result
        self.thread.shutdown(wait=False, cancel_futures=True)

    async def alive(self) -> bool:
        return self.worker is not None


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
