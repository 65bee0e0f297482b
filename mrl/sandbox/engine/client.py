"""`IsolatedExecutor`: the trainer's side. A thread per slot hands executions to that slot's supervisor."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar
from weakref import WeakSet

from mrl.errors import SandboxError
from mrl.sandbox.engine.slot import Slot, module_paths
from mrl.sandbox.engine.wire import decode_observation, encode_request, not_run
from mrl.sandbox.execution import Execution, Observation

log = logging.getLogger("mrl.sandbox")
T = TypeVar("T")
ATTEMPTS = 3
"""How often an execution is tried before it is a `sandbox_error`."""


class IsolatedExecutor:
    """Executions in isolated processes of this machine, `slots` at a time. Usable from any thread and event loop.

    An execution lost to a failure of ours runs again, in a new supervisor; nothing is ever answered in its place.
    """

    def __init__(
        self,
        slots: int | None = None,
        layer: str = "auto",
        unsafe: bool = False,
        modules: tuple[str, ...] = (),
        python: str = sys.executable,
    ) -> None:
        """slots: default one per usable core. layer: `auto` is the strongest that passes its self-test here.
        modules: third-party ones (`numpy`) that programs may import. Raises SandboxError when none does and not
        `unsafe`, which runs programs with limits but without isolation, and says so in the log."""
        from mrl.sandbox.confine import selftest

        if slots is not None and slots < 1:
            raise SandboxError(f"sandbox: slots must be at least 1, not {slots}")
        self.slots = slots or usable_cores()
        module_paths(modules)  # raises for one that is not installed
        self.modules, self.python = modules, python
        self.layer = selftest.choose(layer, unsafe, python)
        if self.layer == "unsafe":
            log.warning("sandbox: UNSAFE, programs run without isolation: they can read files and use the network")
        self._threads = ThreadPoolExecutor(self.slots, thread_name_prefix="mrl-sandbox")
        self._lock = threading.Lock()
        self._idle: list[Slot] = []
        self._busy: dict[Future[Any], Slot] = {}
        self._unwanted: WeakSet[Future[Any]] = WeakSet()
        self._closed = False

    def submit(self, execution: Execution) -> Future[Observation]:
        """Its observation, as a future. Cancelling a future that runs does not stop it; `cancel` does."""
        return self._start(
            execution.limits.wall_seconds, lambda: encode_request(execution), partial(decode_observation, execution)
        )

    def submit_request(self, request: bytes, wall_seconds: float) -> Future[dict[str, Any]]:
        """The same with both ends as they travel: an encoded execution in, what its supervisor answered out."""
        return self._start(wall_seconds, lambda: request, dict)

    async def execute(self, executions: list[Execution]) -> list[Observation]:
        """One observation per execution, in order. Cancelling it kills what it started."""
        futures = [self.submit(execution) for execution in executions]
        try:
            return list(await asyncio.gather(*map(asyncio.wrap_future, futures)))
        finally:
            self._cancel(futures)

    async def close(self) -> None:
        await asyncio.to_thread(self.shutdown)

    def shutdown(self) -> None:
        """`close` for code that has no event loop. Safe to call twice."""
        with self._lock:
            self._closed = True
            busy = list(self._busy)
        self._cancel(busy)
        self._threads.shutdown(wait=True)  # what waits for its turn is answered that this is closed
        while self._idle:
            self._idle.pop().stop()

    def _cancel(self, futures: Sequence[Future[Any]]) -> None:
        with self._lock:
            for future in futures:
                future.cancel()
                self._unwanted.add(future)  # its slot may still be starting
                slot = self._busy.get(future)
                if slot is not None:
                    slot.cancelled = True
                    slot.interrupt()

    def _start(
        self, wall_seconds: float, encode: Callable[[], bytes], decode: Callable[[dict[str, Any]], T]
    ) -> Future[T]:
        future: Future[T] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(decode(self._answer(encode(), wall_seconds, future)))
            except BaseException as error:
                future.set_exception(error)

        self._threads.submit(work)
        return future

    def _answer(self, request: bytes, wall_seconds: float, future: Future[Any]) -> dict[str, Any]:
        problem = ""
        for _ in range(ATTEMPTS):
            if self._closed:
                problem = "the sandbox was closed"
                break
            try:
                slot = self._take(future)
            except SandboxError as error:
                problem = str(error)
                continue
            try:
                answer = None if slot.cancelled else slot.run(request, wall_seconds)
            except SandboxError as error:
                problem = str(error)
                answer = None
            finally:
                with self._lock:
                    self._busy.pop(future, None)
            if slot.cancelled:
                slot.stop()
                return not_run("cancelled")
            if answer is None or answer["status"] == "sandbox_error":
                problem = problem if answer is None else answer["detail"]
                slot.stop()
                continue
            with self._lock:
                self._idle.append(slot)
            return answer
        return not_run(problem)

    def _take(self, future: Future[Any]) -> Slot:
        """Raises SandboxError when none can be started."""
        with self._lock:
            slot = self._idle.pop() if self._idle else None
        if slot is None:
            slot = Slot(self.layer, self.modules, self.python)
        with self._lock:
            self._busy[future] = slot
            slot.cancelled = self._closed or future in self._unwanted
        return slot


def usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
