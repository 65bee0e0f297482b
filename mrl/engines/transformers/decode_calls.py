"""Who asked the `transformers` engine for what: calls that are decoded, and errands done between two tokens."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from mrl.engines.transformers.decode_queue import Call, Job, new_answer
from mrl.errors import EngineError
from mrl.system.threads import InTurn
from mrl.types import Completion, GenerateRequest

_ONE_AT_A_TIME = InTurn("mrl-engine")
"""The thread of all engines in this process that end a call before they take the next one."""


class Decode(Protocol):
    """Decodes jobs, and those that `calls.more()` adds, until all ended or `calls.interrupted()`; returns the rest."""

    def __call__(self, jobs: list[Job], calls: DecodeThread) -> list[Job]: ...


class DecodeThread:
    """The one thread of an engine, so that calls queue up. It lives while there is something to do: an idle one would
    keep its share of torch's threads from those who train (see mrl.system.threads).

    jobs_of: a call's jobs. Raises EngineError for requests that cannot be served. continuous: calls that come while
    others are decoded join them; otherwise they wait, which keeps the rows that decode together, and so the last bits
    of their numbers, the same from run to run.
    """

    def __init__(self, decode: Decode, jobs_of: Callable[[Call], list[Job]], *, continuous: bool) -> None:
        self._decode, self._jobs_of, self._continuous = decode, jobs_of, continuous
        # Engines whose calls join each other may never come to an end, so each of them has a thread of its own.
        self._thread = InTurn("mrl-engine") if continuous else _ONE_AT_A_TIME
        self.sampled = 0
        """Tokens so far: the decoding counts them."""
        self._lock = threading.Lock()
        self._waiting: deque[Call | _Errand] = deque()
        self._urgent: deque[_Errand] = deque()
        self._running: list[Call] = []
        """Those being decoded."""
        self._busy = self._closed = False

    def submit(self, requests: Sequence[GenerateRequest]) -> Call:
        """Decode these. Raises EngineError when closed."""
        call = Call(requests)
        if not requests:
            call.answer.set_result([])
        self._add(self._waiting, call)
        return call

    def errand(self, function: Callable[[], Any], *, urgent: bool = False) -> Future[Any]:
        """Run `function` on the engine's thread: in its turn, or `urgent`, between two tokens of what is decoded.

        Raises EngineError when closed.
        """
        errand = _Errand(function)
        self._add(self._urgent if urgent else self._waiting, errand)
        return errand.answer

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
        """A job is done. Calls that join others are answered at once; a call alone when the model is as it was before
        (whoever shares it may go on with it then)."""
        job.call.take(job.index, completion)
        if self._continuous:
            job.call.deliver()

    def more(self) -> list[Job]:
        """Jobs that came since and may join."""
        if not self._continuous or not self._waiting:
            return []
        calls: list[Call] = []
        with self._lock:
            while self._waiting and isinstance(self._waiting[0], Call):
                call = self._waiting.popleft()
                assert isinstance(call, Call)
                calls.append(call)
        return self._begin(calls)

    # --- the thread -------------------------------------------------------------------------------------------------

    def _add(self, queue: deque[Any], item: Call | _Errand) -> None:
        with self._lock:
            if self._closed:
                raise _closed()
            queue.append(item)
            if not self._busy:
                self._busy = True
                self._thread.submit("decode", self._drive)

    def _drive(self) -> None:
        unfinished: list[Job] = []
        while True:
            errand, calls = self._next(idle=not unfinished)
            if self._closed:
                self._fail_all(_closed())
                return
            if errand is not None:
                errand.run()
            elif calls or unfinished:
                try:
                    unfinished = self._decode([*unfinished, *self._begin(calls)], self)
                except Exception as error:  # whatever it is, those who wait for an answer have to hear of it
                    unfinished = []
                    self._fail(self._running, error)
                for call in self._running:
                    call.deliver()
                self._running = [call for call in self._running if not call.answer.done() and not call.cancelled]
                unfinished = [job for job in unfinished if not job.call.cancelled]
            else:
                return

    def _next(self, *, idle: bool) -> tuple[_Errand | None, list[Call]]:
        """What to do next. idle: nothing was interrupted that has to go on first."""
        with self._lock:
            if self._urgent:
                return self._urgent.popleft(), []
            if idle and self._waiting:
                first = self._waiting.popleft()
                return (None, [first]) if isinstance(first, Call) else (first, [])
            if idle:
                self._busy = False
            return None, []

    def _begin(self, calls: list[Call]) -> list[Job]:
        """The jobs of calls whose decoding begins."""
        jobs: list[Job] = []
        for call in calls:
            if call.cancelled or call.answer.done():
                continue
            try:
                jobs += self._jobs_of(call)
                self._running.append(call)
            except EngineError as error:
                call.answer.set_exception(error)
        return jobs

    def _fail_all(self, error: EngineError) -> None:
        with self._lock:
            waiting = [*self._urgent, *self._waiting, *self._running]
            self._urgent.clear()
            self._waiting.clear()
        self._fail(waiting, error)
        self._running = []

    def _fail(self, waiting: Sequence[Call | _Errand], error: Exception) -> None:
        for item in waiting:
            if not item.answer.done():
                item.answer.set_exception(error)


class _Errand:
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
