"""What runs inside the sandbox and what comes out: a program and its tests in, a verdict out.

No value that a program made is decoded in this process: the confined judge has compared them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from mrl.sandbox.base import Limits, Program, Test, Verdict


@dataclass(frozen=True, slots=True)
class Execution:
    """A program and the tests that judge it. Without tests, the program is run as a script."""

    code: str
    tests: tuple[Test, ...] = ()
    limits: Limits = Limits()  # noqa: RUF009  (frozen)
    stdin: str = ""
    """Of the script, where there are no tests."""
    report: tuple[str, ...] = ()
    """Names of the tests whose values are wanted: `Observation.report`."""

    @classmethod
    def of(cls, program: Program) -> Execution:
        return cls(program.code, program.tests, program.limits)


@dataclass(slots=True)
class Observation:
    """What happened to one execution."""

    verdict: Verdict
    report: list[str | None] = field(default_factory=list)
    """`repr` of each name that was asked for, where that reads back as the value; empty where the tests did not come to
    their end."""
    exit_code: int | None = None
    signal: int | None = None


class Executor(Protocol):
    """Runs executions in isolation, `slots` at a time."""

    layer: str
    """Which isolation it uses: A, B, C or unsafe."""

    async def execute(self, executions: list[Execution]) -> list[Observation]:
        """One observation per execution, in order. Never raises for what the code does."""
        ...

    async def close(self) -> None:
        """Leave no process, descriptor or file behind."""
        ...
