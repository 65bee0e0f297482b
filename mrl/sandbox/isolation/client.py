"""`IsolatedExecutor`: the trainer's side. A thread per slot hands executions to that slot's supervisor."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from mrl.errors import SandboxError
from mrl.sandbox import plain
from mrl.sandbox.execution import Answer, Execution, Observation
from mrl.sandbox.isolation.slot import Slot

log = logging.getLogger("mrl.sandbox")
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
        from mrl.sandbox.isolation import selftest

        if slots is not None and slots < 1:
            raise SandboxError(f"sandbox: slots must be at least 1, not {slots}")
        self.slots = slots or usable_cores()
        self.modules, self.python = modules, python
        self.layer = selftest.choose(layer, unsafe, python)
        if self.layer == "unsafe":
            log.warning("sandbox: UNSAFE, programs run without isolation: they can read files and use the network")
        self._threads = ThreadPoolExecutor(self.slots, thread_name_prefix="mrl-sandbox")
        self._lock = threading.Lock()
        self._idle: list[Slot] = []
        self._busy: dict[Future[Observation], Slot] = {}
        self._closed = False

    def submit(self, execution: Execution) -> Future[Observation]:
        """Its observation, as a future. Cancelling a future that runs does not stop it; `cancel` does."""
        future: Future[Observation] = Future()
        self._threads.submit(self._work, execution, future)
        return future

    async def execute(self, executions: list[Execution]) -> list[Observation]:
        """One observation per execution, in order. Cancelling it kills what it started."""
        futures = [self.submit(execution) for execution in executions]
        try:
            return list(await asyncio.gather(*map(asyncio.wrap_future, futures)))
        finally:
            self._cancel(futures)

    async def execute_stream(self, executions: list[Execution]) -> AsyncIterator[tuple[int, Observation]]:
        """Index and observation of each, as they end."""
        futures = [self.submit(execution) for execution in executions]
        waiting = {asyncio.wrap_future(future): index for index, future in enumerate(futures)}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for future in done:
                    yield waiting.pop(future), future.result()
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
        self._threads.shutdown(wait=True, cancel_futures=True)
        while self._idle:
            self._idle.pop().stop()

    def _cancel(self, futures: list[Future[Observation]]) -> None:
        with self._lock:
            for future in futures:
                future.cancel()
                slot = self._busy.get(future)
                if slot is not None:
                    slot.cancelled = True
                    slot.interrupt()

    def _work(self, execution: Execution, future: Future[Observation]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(self._observe(execution, future))
        except BaseException as error:
            future.set_exception(error)

    def _observe(self, execution: Execution, future: Future[Observation]) -> Observation:
        request = encode_request(execution)
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
                answer = slot.run(request, execution.limits.wall_seconds)
            except SandboxError as error:
                problem = str(error)
                answer = None
            finally:
                with self._lock:
                    self._busy.pop(future, None)
            if slot.cancelled:
                slot.stop()
                return Observation("sandbox_error", detail="cancelled")
            if answer is None or answer["status"] == "sandbox_error":
                problem = problem if answer is None else answer["detail"]
                slot.stop()
                continue
            with self._lock:
                self._idle.append(slot)
            return decode_observation(execution, answer)
        return Observation("sandbox_error", [Answer("unanswered") for _ in execution.calls], detail=problem)

    def _take(self, future: Future[Observation]) -> Slot:
        """Raises SandboxError when none can be started."""
        with self._lock:
            slot = self._idle.pop() if self._idle else None
        if slot is None:
            slot = Slot(self.layer, self.modules, self.python)
        with self._lock:
            self._busy[future] = slot
        return slot


def encode_request(execution: Execution) -> bytes:
    limits = execution.limits
    calls = [
        {
            "function": call.function,
            "args": [plain.dumps(value) for value in call.args],
            "kwargs": [[name, plain.dumps(value)] for name, value in call.kwargs],
        }
        for call in execution.calls
    ]
    request = {
        "code": execution.code,
        "stdin": execution.stdin,
        "calls": calls,
        "load": False,
        "limits": {
            "wall_seconds": limits.wall_seconds,
            "cpu_seconds": limits.cpu_seconds,
            "memory_mb": limits.memory_mb,
            "output_bytes": limits.output_bytes,
            "file_mb": limits.file_mb,
            "open_files": limits.open_files,
            "processes": limits.processes,
        },
    }
    return json.dumps(request).encode()


def decode_observation(execution: Execution, data: dict[str, Any]) -> Observation:
    """What the supervisor passed on. A value that cannot be read ends the answers there: `protocol`."""
    status, detail, answers = data["status"], data["detail"], []
    for kind, text in data["answers"]:
        try:
            answers.append(decode_answer(kind, text))
        except (plain.PlainError, ValueError, TypeError) as error:
            status, detail = "protocol", str(error)[:500]
            break
    answers += [Answer("unanswered") for _ in execution.calls[len(answers) :]]
    names = "exception stdout stderr exit_code signal wall_seconds cpu_seconds peak_memory_mb".split()
    return Observation(status, answers, detail=detail, **{name: data[name] for name in names})


def decode_answer(kind: str, text: str) -> Answer:
    """Raises PlainError or ValueError."""
    if kind == "V":
        value = plain.loads(text)
        if type(value) is plain.Opaque:
            return Answer("value", type_name=value.type_name, detail=value.reason, opaque=True)
        return Answer("value", value, type_name=plain.type_name(value))
    bases, detail = json.loads(text)
    if not isinstance(detail, str) or not bases or not all(isinstance(name, str) for name in bases):
        raise ValueError("an exception that cannot be read")
    return Answer("raised", type_name=bases[0][:100], detail=detail[:2000], bases=tuple(b[:100] for b in bases[:20]))


def usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
