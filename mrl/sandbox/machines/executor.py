"""`MachineExecutor`: executions on a pool of machines apart."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, get_args

from mrl.errors import SandboxError
from mrl.sandbox.execution import Answer, EndStatus, Execution, Observation
from mrl.sandbox.isolation.wire import decode_observation, encode_request, not_run
from mrl.sandbox.machines.agent import MACHINE
from mrl.sandbox.machines.base import OpenMachine
from mrl.sandbox.machines.bundle import greeting
from mrl.sandbox.machines.link import Link

ATTEMPTS = 3
"""How often an execution is tried, each time on another machine if the last was lost, before it is `sandbox_error`."""
GRACE_SECONDS = 60.0
"""How long past an execution's deadline its answer may be under way."""
START_SECONDS = 300.0
NEEDS_A_LAYER = (
    "these tests need the program's objects, and so a second process beside the program's; on this machine nothing"
    " separates the two (no layer of isolation holds on it). Write the tests as asserts on plain data"
)


class MachineExecutor:
    """At most `machines` machines, opened as they are needed, each with `slots` executions at a time.

    Usable from any thread and event loop: the machines belong to a loop of this object's own.
    """

    def __init__(
        self,
        open_machine: OpenMachine,
        machines: int = 1,
        slots: int = 1,
        layer: str = "auto",
        modules: Sequence[str] = (),
    ) -> None:
        """open_machine: see `OpenMachine`. Nothing is started before the first execution. layer: `auto` uses the
        strongest that holds on the machine, `machine` relies on none and uses each machine for one program only.
        modules: third-party ones, installed there, that programs may import. Raises SandboxError."""
        for name, value in (("machines", machines), ("slots", slots)):
            if not 1 <= value <= 1000:
                raise SandboxError(f"sandbox: {name} must be between 1 and 1000, not {value}")
        if layer not in ("auto", MACHINE):
            raise SandboxError(f"sandbox: layer {layer!r} is unknown for machines apart; use auto or machine")
        self.machines, self.slots = machines, slots
        self._settings = greeting(slots, layer, list(modules))
        self.layer = "remote"
        """Of the machines, once one was opened: A, B, C, or `machine` where each is used for one program only."""
        self._open_machine = open_machine
        self._links: list[Link] = []
        self._opening = 0
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Condition()
        self._thread = threading.Thread(target=self._loop.run_forever, name="mrl-sandbox-machines", daemon=True)
        self._thread.start()

    async def execute(self, executions: list[Execution]) -> list[Observation]:
        """One observation per execution, in order."""
        futures = [self._submit(self._run(execution)) for execution in executions]
        try:
            return list(await asyncio.gather(*map(asyncio.wrap_future, futures)))
        finally:
            for future in futures:
                future.cancel()

    async def close(self) -> None:
        await asyncio.to_thread(self.shutdown)

    def shutdown(self) -> None:
        """Give every machine back. Safe to call twice."""
        if not self._closed:
            self._closed = True
            self._submit(self._close_links()).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _submit(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    # --- in the loop of its own -------------------------------------------------------------------------------------

    async def _run(self, execution: Execution) -> Observation:
        request, seconds = encode_request(execution), execution.limits.wall_seconds + GRACE_SECONDS
        problem = ""
        for _ in range(ATTEMPTS):
            if self._closed:
                problem = "the sandbox was closed"
                break
            try:
                link = await self._take()
            except SandboxError as error:
                problem = str(error)
                continue
            used = True
            try:
                if link.single and execution.peer is not None:
                    used = False
                    return _unanswered(execution, NEEDS_A_LAYER)
                answer = await link.ask(request, seconds)
                if answer.get("status") != "sandbox_error":
                    return _decode(execution, answer)
                problem = str(answer.get("detail"))
            except SandboxError as error:
                problem = str(error)
            finally:
                await asyncio.shield(self._give_back(link, keep=not (link.single and used)))
        return _unanswered(execution, problem)

    async def _take(self) -> Link:
        """A machine with room, opened if need be. Raises SandboxError when it cannot be."""
        async with self._changed:
            while True:
                self._links = [link for link in self._links if link.lost is None]
                link = next((link for link in self._links if link.busy < (1 if link.single else link.slots)), None)
                if link is not None:
                    link.busy += 1
                    return link
                if len(self._links) + self._opening < self.machines:
                    break
                await self._changed.wait()
            self._opening += 1
        try:
            link = await Link.open(self._open_machine, self.slots, self._settings, START_SECONDS)
            link.busy, self.layer = 1, link.layer
            self._links.append(link)
            return link
        finally:
            async with self._changed:
                self._opening -= 1
                self._changed.notify_all()

    async def _give_back(self, link: Link, keep: bool) -> None:
        """A cancelled execution goes on to its own limits, where others share the machine."""
        if not keep:
            await link.close("given back")
        async with self._changed:
            link.busy -= 1
            self._changed.notify_all()

    async def _close_links(self) -> None:
        await asyncio.gather(*(link.close("the sandbox was closed") for link in self._links))
        async with self._changed:
            self._changed.notify_all()


def _decode(execution: Execution, answer: dict[str, Any]) -> Observation:
    """A machine that a program took over may answer anything: what cannot be read says nothing of the tests."""
    try:
        if answer["status"] not in get_args(EndStatus):
            raise ValueError(answer["status"])
        return decode_observation(execution, {**not_run(""), **answer})
    except Exception as error:
        return _unanswered(execution, f"an answer that cannot be read: {type(error).__name__}", "protocol")


def _unanswered(execution: Execution, detail: str, status: Any = "sandbox_error") -> Observation:
    return Observation(status, [Answer("unanswered") for _ in execution.calls], detail=detail)
