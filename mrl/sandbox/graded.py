"""A sandbox made of an executor: each program judged once, a failure of ours tried again."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from mrl.errors import SandboxError
from mrl.sandbox.base import Program, Verdict
from mrl.sandbox.execution import Execution, Executor

ATTEMPTS = 2
"""How often a program is judged before a failure of the sandbox is reported."""


class GradedSandbox:
    """Programs judged by an executor's confined processes.

    Identical programs in one `run` call are judged once. Programs do not wait for one another.
    """

    name = "graded"

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._closed = False

    @property
    def layer(self) -> str:
        """The isolation in use: A, B, C or unsafe; of machines apart `remote` until one is open."""
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
                (observation,) = await self._executor.execute([Execution.of(program)])
                verdict = observation.verdict
            except Exception as error:  # ours, whatever it is: the program was not judged
                verdict = Verdict("sandbox_error", detail=f"{type(error).__name__}: {error}")
            if verdict.status != "sandbox_error":
                break
        return verdict
