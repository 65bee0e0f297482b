"""The `local` sandbox: programs run in isolation and answer with data, which is judged here."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace

from mrl.errors import SandboxError
from mrl.sandbox.base import Program, Verdict
from mrl.sandbox.execution import Execution, Executor, Observation
from mrl.sandbox.grading import judge

ATTEMPTS = 2
"""How often a program is judged before a failure of the sandbox is reported."""


class LocalSandbox:
    """Programs in isolated processes of this machine, `slots` at a time.

    The process that runs a program never sees what its tests expect: it gets calls (or stdin) and answers with plain
    data (or stdout), which is compared in this process. See docs/sandbox.md for the layers of isolation and for what
    is not promised. Identical programs in one `run` call are judged once. Programs do not wait for one another.
    """

    name = "local"

    def __init__(
        self,
        slots: int | None = None,
        layer: str = "auto",
        unsafe: bool = False,
        modules: tuple[str, ...] = (),
        executor: Executor | None = None,
    ) -> None:
        """slots: programs at a time, default one per usable core. layer: `auto` is the strongest that works here.
        unsafe: run without isolation where no layer works. modules: third-party ones that programs may import.
        executor: what runs them, instead of isolated processes with these settings.

        Raises SandboxError, saying what is missing and what to do, where no layer of isolation works.
        """
        self._executor = executor or _isolated(slots, layer, unsafe, modules)
        self._closed = False

    @property
    def layer(self) -> str:
        """The isolation in use: A, B, C or unsafe."""
        return self._executor.layer

    async def run(self, programs: list[Program]) -> list[Verdict]:
        """Judge every program, in the order given; identical ones once. Cancelling it kills what it started.

        Raises SandboxError only when the sandbox was closed.
        """
        if self._closed:
            raise SandboxError("this sandbox was closed")
        unique = list(dict.fromkeys(programs))
        tasks = [asyncio.ensure_future(self._judge(program)) for program in unique]
        try:
            verdicts = dict(zip(unique, await asyncio.gather(*tasks), strict=True))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [replace(verdicts[p], tests=[replace(t) for t in verdicts[p].tests]) for p in programs]

    async def close(self) -> None:
        """Kill whatever runs and leave no process and no file behind. Safe to call twice."""
        self._closed = True
        await self._executor.close()

    def shutdown(self) -> None:
        """`close` for code that has no event loop."""
        self._closed = True
        stop = getattr(self._executor, "shutdown", None)
        if stop is not None:
            stop()
        else:
            asyncio.run(self._executor.close())

    async def _judge(self, program: Program) -> Verdict:
        verdict = Verdict("sandbox_error", detail="never ran")
        for _ in range(ATTEMPTS):
            if self._closed:
                return Verdict("sandbox_error", detail="the sandbox was closed")
            try:
                verdict = await judge(program, self._execute)
            except Exception as error:  # ours, whatever it is: the program was not judged
                verdict = Verdict("sandbox_error", detail=f"{type(error).__name__}: {error}")
            if verdict.judged:
                break
        return verdict

    async def _execute(self, execution: Execution) -> Observation:
        (observation,) = await self._executor.execute([execution])
        return observation


def make_auto(slots: int | None = None) -> LocalSandbox:
    """`sandbox: auto`: the strongest isolation that works here. Raises SandboxError saying what to do when none does;
    it never falls back to a weaker sandbox by itself."""
    try:
        return LocalSandbox(slots)
    except SandboxError as error:
        raise SandboxError(
            f"{error}\nsandbox: 'auto' needs one of its layers. `mrl sandbox check` says what each lacks here;"
            " `sandbox: process` runs programs with limits only, which a model can cheat"
        ) from None


def _isolated(slots: int | None, layer: str, unsafe: bool, modules: tuple[str, ...]) -> Executor:
    if sys.platform != "linux":
        raise SandboxError(
            f"sandbox: 'local' isolates with Linux's means, and this is {sys.platform}. Run the reward worker on Linux"
            " (on Windows: inside WSL), register a remote sandbox (see docs/sandbox.md), or choose `sandbox: process`"
            " for code that does not set out to cheat"
        )
    from mrl.sandbox.isolation.client import IsolatedExecutor

    return IsolatedExecutor(slots, layer, unsafe, modules)
