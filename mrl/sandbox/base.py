"""What a sandbox is: programs nobody trusts in, verdicts out.

A verdict says what happened. Whether that earns a reward is decided in `mrl.rewards.code`; a failure of the sandbox
itself (`sandbox_error`) is never a verdict on the program.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Status = Literal[
    "passed",  # every test passed
    "failed",  # at least one test answered wrongly
    "error",  # the program raised before its tests could run
    "timeout",
    "memory",
    "crashed",  # ended by a signal of its own making
    "killed",  # ended by a signal from outside
    "exited",  # left before its tests were done
    "output_limit",
    "protocol",  # what came back could not be read
    "unjudgeable",  # a test says nothing here of any program; `detail` says why
    "sandbox_error",  # ours: the program was not judged
]


@dataclass(frozen=True, slots=True)
class IOTest:
    """Run the program with `input` on stdin; its stdout must be `output`."""

    input: str
    output: str
    compare: Literal["lines", "exact", "tokens", "numbers"] = "lines"
    """lines: equal but for white space at the ends of lines and of the text. exact: every character. tokens: the same
    words. numbers: the same words, where two numbers that are not both whole may differ by `tolerance`."""
    tolerance: float = 1e-6
    """Relative or absolute."""


Test = str | IOTest
"""Either Python lines that assert something of the program's names, or stdin and stdout."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one program may use."""

    wall_seconds: float = 30.0
    cpu_seconds: float = 30.0
    memory_mb: int = 512
    output_bytes: int = 1_000_000
    file_mb: int = 16
    open_files: int = 64
    processes: int = 32
    """Processes and threads."""


@dataclass(frozen=True, slots=True)
class Program:
    """Code with the tests that judge it."""

    code: str
    tests: tuple[Test, ...]
    limits: Limits = Limits()


@dataclass(slots=True)
class TestResult:
    """What became of one test."""

    __test__ = False  # a noun of ours; pytest must not collect it

    passed: bool
    detail: str = ""
    """For the log: expected and got, or the exception; of a test that passed, what is odd about that."""


@dataclass(slots=True)
class Verdict:
    """What happened to one program."""

    status: Status
    tests: list[TestResult] = field(default_factory=list)
    """One per test, in order; tests that never ran are `passed=False`. Empty for `sandbox_error`."""
    detail: str = ""
    stdout: str = ""
    stderr: str = ""
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_memory_mb: float = 0.0

    @property
    def judged(self) -> bool:
        """False when the sandbox failed, or the tests cannot be run here: nothing is known of the program."""
        return self.status not in ("sandbox_error", "unjudgeable")

    @property
    def fraction_passed(self) -> float:
        """Share of tests passed, in [0, 1]."""
        return sum(t.passed for t in self.tests) / len(self.tests) if self.tests else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for `--json` and the run store."""
        from dataclasses import asdict

        return asdict(self)


class Sandbox(Protocol):
    """Implemented by one file per technology in this package."""

    name: str

    async def run(self, programs: list[Program]) -> list[Verdict]:
        """Judge every program, in the order given. Never raises for what a program does."""
        ...

    async def close(self) -> None:
        """Leave no process and no file behind."""
        ...
