"""`MachineExecutor`: executions on a pool of machines apart."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from typing import Any

from mrl.errors import SandboxError
from mrl.sandbox.base import Status, TestResult, Verdict
from mrl.sandbox.confine.names import LAYERS
from mrl.sandbox.engine.wire import decode_observation, encode_request
from mrl.sandbox.execution import Execution, Observation
from mrl.sandbox.machines.base import OpenMachine
from mrl.sandbox.machines.bundle import greeting
from mrl.sandbox.machines.link import Link, Unfit

ATTEMPTS = 3
"""How often an execution is tried, each time on another machine if the last was lost, before it is `sandbox_error`."""
GRACE_SECONDS = 60.0
"""How long past an execution's deadline its answer may be under way."""
START_SECONDS = 300.0


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
        strongest that holds on the machine; where the one asked for does not hold, nothing is judged.
        modules: third-party ones, installed there, that programs may import. Raises SandboxError."""
        for name, value in (("machines", machines), ("slots", slots)):
            if not 1 <= value <= 1000:
                raise SandboxError(f"sandbox: {name} must be between 1 and 1000, not {value}")
        if layer not in ("auto", *LAYERS):
            raise SandboxError(f"sandbox: layer {layer!r} is unknown; use auto, {', '.join(LAYERS)}")
        self.machines, self.slots = machines, slots
        self._settings = greeting(slots, layer, list(modules))
        self.layer = "remote"
        """Of the machines, once one was opened: A, B, C or unsafe."""
        self._open_machine = open_machine
        self._links: list[Link] = []
        self._opening = 0
        self._unfit = ""
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
            except Unfit as error:
                problem = str(error)
                break
            except SandboxError as error:
                problem = str(error)
                continue
            try:
                answer = await link.ask(request, seconds)
                if answer.get("status") != "sandbox_error":
                    return _decode(execution, answer)
                problem = str(answer.get("detail"))
            except SandboxError as error:
                problem = str(error)
            finally:
                await asyncio.shield(self._give_back(link))
        return _unanswered(execution, problem)

    async def _take(self) -> Link:
        """A machine with room, opened if need be. Raises SandboxError when it cannot be."""
        async with self._changed:
            while True:
                if self._unfit:  # no more machines are paid for
                    raise Unfit(self._unfit)
                self._links = [link for link in self._links if link.lost is None]
                link = next((link for link in self._links if link.busy < link.slots), None)
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
        except Unfit as error:
            self._unfit = str(error)
            raise
        finally:
            async with self._changed:
                self._opening -= 1
                self._changed.notify_all()

    async def _give_back(self, link: Link) -> None:
        """A cancelled execution goes on to its own limits: others share the machine."""
        async with self._changed:
            link.busy -= 1
            self._changed.notify_all()

    async def _close_links(self) -> None:
        await asyncio.gather(*(link.close("the sandbox was closed") for link in self._links))
        async with self._changed:
            self._changed.notify_all()


def _decode(execution: Execution, answer: dict[str, Any]) -> Observation:
    """What cannot be read says nothing of the tests, and the program is what may have made it so."""
    try:
        return decode_observation(execution, answer)
    except Exception as error:
        return _unanswered(execution, f"an answer that cannot be read: {type(error).__name__}", "protocol")


def _unanswered(execution: Execution, detail: str, status: Status = "sandbox_error") -> Observation:
    tests = [TestResult(False, detail) for _ in execution.tests]
    return Observation(Verdict(status, tests if status == "protocol" else [], detail))
