"""The thread of a `transformers` engine: decodes calls together, and runs functions between two tokens.

A call joins the running batch whenever it arrives, and is answered when all its requests are finished. Calls that
arrive in the same turn of the event loop start together: batch composition affects the last bits of the numbers, so
this makes runs with the same calls reproducible.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from mrl.engines.transformers.decode_queue import Call, RequestState, new_answer
from mrl.errors import EngineError
from mrl.system.threads import SerialExecutor
from mrl.types import Completion, GenerateRequest

_SHARED_THREAD = SerialExecutor("mrl-engine")
"""Shared by the engines of this process that are not `endless`: they take turns."""


class Decode(Protocol):
    """Decodes requests, and those that `calls.more()` adds, until all are finished or `calls.interrupted()`.

    Returns the unfinished ones.
    """

    def __call__(self, states: list[RequestState], calls: DecodeThread) -> list[RequestState]: ...


class DecodeThread:
    """An engine's only thread. It lives while there is work: an idle one would keep torch threads from the training
    (see mrl.system.threads).

    request_states: makes the states of a call's requests; answers those that cannot be served. endless: requests may
    keep coming, so the engine gets its own thread; otherwise engines of one process decode one after the other, which
    is faster on a CPU than in parallel.
    """

    def __init__(
        self, decode: Decode, request_states: Callable[[Call], list[RequestState]], *, endless: bool = False
    ) -> None:
        self._decode, self._states_of = decode, request_states
        self._thread = SerialExecutor("mrl-engine") if endless else _SHARED_THREAD
        self.sampled = 0
        """Tokens sampled so far; the decode loop counts them."""
        self._lock = threading.Lock()
        self._arriving: list[Call] = []
        """Calls of this turn of the event loop."""
        self._waiting: deque[Call | _Function] = deque()
        self._urgent: deque[_Function] = deque()
        self._running: dict[Call, None] = {}
        """Calls being decoded, in order."""
        self._busy = self._closed = False

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        """Decode these requests. Raises EngineError when closed. When cancelled, its requests leave the batch."""
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
        """Run `function` on the engine's thread: after earlier calls, or if `urgent` between two tokens of a batch.

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

    # --- called by the decode loop ----------------------------------------------------------------------------------

    def interrupted(self) -> bool:
        """Whether decoding must stop now, between two tokens."""
        return bool(self._urgent) or self._closed

    def cancelled(self) -> bool:
        """Whether a call being decoded was cancelled."""
        return any(call.cancelled for call in self._running)

    def ended(self, state: RequestState, completion: Completion) -> None:
        """A request is finished. Its call is answered when all its requests are; the last running call only after the
        model is back in its former mode (the actor may share it)."""
        state.call.take(state.index, completion)
        others = any(not call.cancelled for call in self._running if call is not state.call)
        if state.call.complete and others:
            self._running.pop(state.call, None)
            state.call.deliver()

    def more(self) -> list[RequestState]:
        """Requests that arrived since and may join the batch."""
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
        """Queue the calls of this turn of the event loop, and of the turns right after it, together."""
        if len(self._arriving) > known:
            asyncio.get_running_loop().call_soon(self._all_arrived, len(self._arriving))
            return
        # Sorted, so that the order does not depend on which call was faster.
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
        unfinished: list[RequestState] = []
        while True:
            function, calls = self._next(idle=not unfinished)
            if self._closed:
                self._fail_all(_closed())
                return
            if function is not None:
                function.run()
            elif calls or unfinished:
                try:
                    states = [*unfinished, *self._begin(calls)]
                    unfinished = self._decode(states, self) if states else []
                except Exception as error:  # any error has to reach the callers that wait
                    unfinished = []
                    self._fail(list(self._running), error)
                for call in self._running:
                    call.deliver()
                self._running = {c: None for c in self._running if not c.answer.done() and not c.cancelled}
                unfinished = [state for state in unfinished if not state.call.cancelled]
            else:
                return

    def _next(self, *, idle: bool) -> tuple[_Function | None, list[Call]]:
        """What to do next. idle: there are no interrupted requests, which would go first."""
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

    def _begin(self, calls: list[Call]) -> list[RequestState]:
        """Mark calls as running; returns the states of their requests."""
        states: list[RequestState] = []
        for call in calls:
            if call.cancelled or call.answer.done():
                continue
            try:
                own = self._states_of(call)
            except Exception as error:  # any error has to reach the callers that wait
                call.answer.set_exception(error)
                continue
            self._running[call] = None
            states += own
        return states

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
