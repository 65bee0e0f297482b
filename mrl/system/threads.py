"""Threads that end with their work.

Every thread that runs torch's operations on a CPU owns a team of further threads (OpenMP), which it keeps until it
ends. As soon as a process has more of them than there are cores, all of them sleep between two operations instead of
spinning, and each operation waits for the kernel: decoding and training then take up to twice as long. So whatever may
run torch does so on a thread from here, none of which waits for work to come: where one thread computes after another,
there is one team, whoever's turn it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
import functools
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

_SOFT_PAUSE = 1
"""OpenMP's `omp_pause_soft`: threads go, settings stay."""


def submit(function: Callable[[], T], name: str, *, daemon: bool = True) -> Future[T]:
    """Run it on a thread of its own. If not a `daemon`, the process waits for it before it ends."""
    answer: Future[T] = Future()
    threading.Thread(target=_run_into, args=(answer, function), name=name, daemon=daemon).start()
    return answer


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    """`asyncio.to_thread` on a thread of its own, not a pool's: cancelled, it blocks neither the loop nor the exit."""
    name, context = f"mrl-{getattr(function, '__name__', 'work')}", contextvars.copy_context()
    return await asyncio.wrap_future(submit(functools.partial(context.run, function, *args), name))


class SerialExecutor:
    """Calls one at a time, in their order, on a thread that lives while there are any.

    The thread does not keep the process from ending, so neither does a call that hangs.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.running: str | None = None
        """The call that has the thread now."""
        self._lock = threading.Lock()
        self._waiting: deque[tuple[str, Callable[[], Any], Future[Any]]] = deque()
        self._alive = False

    def submit(self, name: str, function: Callable[[], T]) -> Future[T]:
        """Run `function` in its turn; `name` says what it is. Cancelling it works until it has begun."""
        answer: Future[T] = Future()
        with self._lock:
            self._waiting.append((name, function, answer))
            if not self._alive:
                self._alive = True
                threading.Thread(target=self._work, name=self.name, daemon=True).start()
        return answer

    def drop_waiting(self) -> None:
        """Cancel what has not begun."""
        with self._lock:
            dropped = list(self._waiting)
            self._waiting.clear()
        for _, _, answer in dropped:
            answer.cancel()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._alive, self.running = False, None
                    return
                self.running, function, answer = self._waiting.popleft()
            _run_into(answer, function)
            del function, answer  # what they hold is not kept while the next one is waited for


def release_openmp_threads() -> None:
    """End the calling thread's OpenMP team, if it has one; the next operation that needs one starts another.

    For threads that live on while others compute, such as a notebook's. Where torch's OpenMP has no way to do so
    (before version 5.0), nothing happens.
    """
    torch = sys.modules.get("torch")
    if torch is None:  # then there is no team
        return
    for library in (Path(torch.__file__ or "").parent / "lib").glob("lib*omp*.so*"):
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(str(library)).omp_pause_resource_all(_SOFT_PAUSE)


def _run_into(answer: Future[T], function: Callable[[], T]) -> None:
    if not answer.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except BaseException as error:  # raised again where the answer is awaited
        answer.set_exception(error)
    else:
        answer.set_result(result)
