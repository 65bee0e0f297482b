"""The thread of a `transformers` engine: calls that decode together, and functions it runs between two tokens.

Calls join what is decoded whenever they come, and each is answered when its own requests have ended. Calls that come
together, in one turn of the event loop, begin together: which rows decode side by side decides the last bits of their
numbers, and so the same calls give the same bits in every run.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from mrl.engines.transformers.decode_queue import Call, Job, new_answer
from mrl.errors import EngineError
from mrl.system.threads import SerialExecutor
from mrl.types import Completion, GenerateRequest

_SHARED_THREAD = SerialExecutor("mrl-engine")
"""The thread of all engines in this process that come to an end before another one begins."""


class Decode(Protocol):
    """Decodes jobs, and those that `calls.more()` adds, until all ended or `calls.interrupted()`; returns the rest."""

    def __call__(self, jobs: list[Job], calls: DecodeThread) -> list[Job]: ...


class DecodeThread:
    """The one thread of an engine. It lives while there is something to do: an idle one would keep its share of torch's
    threads from those who train (see mrl.system.threads).

    jobs_of: a call's jobs; requests that cannot be served are answered in it. endless: requests may keep coming, so
    that the engine needs a thread to itself; otherwise engines of one process decode one after the other, which on a
    CPU is faster than side by side.
    """

    def __init__(self, decode: Decode, jobs_of: Callable[[Call], list[Job]], *, endless: bool = False) -> None:
        self._decode, self._jobs_of = decode, jobs_of
        self._thread = SerialExecutor("mrl-engine") if endless else _SHARED_THREAD
        self.sampled = 0
        """Tokens so far: the decoding counts them."""
        self._lock = threading.Lock()
        self._arriving: list[Call] = []
        """Of this turn of the event loop."""
        self._waiting: deque[Call | _Function] = deque()
        self._urgent: deque[_Function] = deque()
        self._running: dict[Call, None] = {}
        """Those being decoded, in order."""
        self._busy = self._closed = False

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        """Decode these. Raises EngineError when closed. Cancelled, it has them left out from the next token on."""
        if self._closed:
            raise _closed()
        if not requests:
            return []
        call = Call(requests)
        if not self._arriving:
            asyncio.get_running_loop().call_soon(self._all_arrived, 0)
        self._arriving.append(call)
        try:
            return await asyncio.wrap_future(call.answer)
        except asyncio.CancelledError:
            call.cancelled = True
            raise

    def run(self, function: Callable[[], Any], *, urgent: bool = False) -> Future[Any]:
        """Run `function` on the engine's thread: in its turn, or `urgent`, between two tokens of what is decoded.

        Raises EngineError when closed.
        """
        waiting = _Function(function)
        self._add(self._urgent if urgent else self._waiting, [waiting])
        return waiting.answer

    def close(self) -> None:
        """End running and waiting calls with EngineError. Calling it twice is allowed."""
        with self._lock:
            self._closed = True
            busy = self._busy
        if not busy:
            self._fail_all(_closed())

    # --- what the decoding asks -------------------------------------------------------------------------------------

    def interrupted(self) -> bool:
        """Whether decoding has to stop between two tokens."""
        return bool(self._urgent) or self._closed

    def cancelled(self) -> bool:
        """Whether some of what is decoded is not wanted any more."""
        return any(call.cancelled for call in self._running)

    def ended(self, job: Job, completion: Completion) -> None:
        """A job is done. Its call is answered when all of its jobs are; the last call that runs only when the model is
        as it was before (whoever shares it may go on with it then)."""
        job.call.take(job.index, completion)
        others = any(not call.cancelled for call in self._running if call is not job.call)
        if job.call.complete and others:
            self._running.pop(job.call, None)
            job.call.deliver()

    def more(self) -> list[Job]:
        """Jobs that came since and may join."""
        if not self._waiting:
            return []
        calls: list[Call] = []
        with self._lock:
            while self._waiting and isinstance(self._waiting[0], Call):
                call = self._waiting.popleft()
                assert isinstance(call, Call)
                calls.append(call)
        return self._begin(calls)

    # --- the thread -------------------------------------------------------------------------------------------------

    def _all_arrived(self, known: int) -> None:
        """Begin the calls of this turn of the event loop, and of those right after it, together."""
        if len(self._arriving) > known:
            asyncio.get_running_loop().call_soon(self._all_arrived, len(self._arriving))
            return
        # In an order that does not depend on which call was faster.
        arrived, self._arriving = sorted(self._arriving, key=lambda call: call.requests[0].id), []
        try:
            self._add(self._waiting, arrived)
        except EngineError as error:
            self._fail(arrived, error)

    def _add(self, queue: deque[Any], items: Sequence[Call | _Function]) -> None:
        with self._lock:
            if self._closed:
                raise _closed()
            queue.extend(items)
            if not self._busy:
                self._busy = True
                self._thread.submit("decode", self._drive)

    def _drive(self) -> None:
        unfinished: list[Job] = []
        while True:
            function, calls = self._next(idle=not unfinished)
            if self._closed:
                self._fail_all(_closed())
                return
            if function is not None:
                function.run()
            elif calls or unfinished:
                try:
                    jobs = [*unfinished, *self._begin(calls)]
                    unfinished = self._decode(jobs, self) if jobs else []
                except Exception as error:  # whatever it is, those who wait for an answer have to hear of it
                    unfinished = []
                    self._fail(list(self._running), error)
                for call in self._running:
                    call.deliver()
                self._running = {c: None for c in self._running if not c.answer.done() and not c.cancelled}
                unfinished = [job for job in unfinished if not job.call.cancelled]
            else:
                return

    def _next(self, *, idle: bool) -> tuple[_Function | None, list[Call]]:
        """What to do next. idle: nothing was interrupted that has to go on first."""
        with self._lock:
            if self._urgent:
                return self._urgent.popleft(), []
            if not idle:
                return None, []
            calls: list[Call] = []
            while self._waiting:
                first = self._waiting[0]
                if isinstance(first, _Function):
                    if calls:
                        break
                    self._waiting.popleft()
                    return first, []
                self._waiting.popleft()
                calls.append(first)
            self._busy = bool(calls)
            return None, calls

    def _begin(self, calls: list[Call]) -> list[Job]:
        """The jobs of calls whose decoding begins."""
        jobs: list[Job] = []
        for call in calls:
            if call.cancelled or call.answer.done():
                continue
            try:
                own = self._jobs_of(call)
            except EngineError as error:
                call.answer.set_exception(error)
                continue
            self._running[call] = None
            jobs += own
        return jobs

    def _fail_all(self, error: EngineError) -> None:
        with self._lock:
            waiting = [*self._urgent, *self._waiting, *self._running]
            self._urgent.clear()
            self._waiting.clear()
        self._fail(waiting, error)
        self._running = {}

    def _fail(self, waiting: Sequence[Call | _Function], error: Exception) -> None:
        for item in waiting:
            if not item.answer.done():
                item.answer.set_exception(error)


class _Function:
    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.answer: Future[Any] = new_answer()

    def run(self) -> None:
        try:
            self.answer.set_result(self.function())
        except Exception as error:  # raised again where the answer is awaited
            self.answer.set_exception(error)


def _closed() -> EngineError:
    return EngineError("the engine is closed")
