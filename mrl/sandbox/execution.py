"""What runs inside the sandbox and what comes out: code and inputs in, plain data out, never a verdict.

The executor (isolation) and the graders (comparison) meet here. Expected outputs have no field: they never enter the
process that runs untrusted code.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from mrl.sandbox.base import Limits

EndStatus = Literal[
    "done",  # it ran to its end, and every call was answered
    "error",  # the code raised at import (its own top level)
    "timeout",
    "memory",
    "crashed",
    "killed",
    "exited",  # it left before it was done (sys.exit, os._exit); a script: with an exit code other than 0
    "output_limit",
    "protocol",
    "sandbox_error",
]


@dataclass(frozen=True, slots=True)
class Call:
    """One question to the loaded code: an expression evaluated in its namespace, with literal arguments."""

    function: str
    """Dotted name looked up in the code's namespace, e.g. `f` or `Solution().twoSum` (a no-argument construction)."""
    args: tuple[Any, ...] = ()
    """Plain data: None, bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset of these."""
    kwargs: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Execution:
    """One process: the code is run, then the calls are answered in order. With `stdin` and no calls: a script."""

    code: str
    calls: tuple[Call, ...] = ()
    stdin: str = ""
    limits: Limits = Limits()  # noqa: RUF009  (frozen)
    peer: tuple[str, ...] | None = None
    """Trusted tests, each the text of some statements. They run one after the other, in one namespace, in a second
    sandboxed process, where the names of `code` are proxies to the first process (only plain data crosses). A test
    that raises does not stop the next. Their outcomes are `Observation.peer`, one per test."""


@dataclass(slots=True)
class Answer:
    """What one call came to."""

    kind: Literal["value", "raised", "unanswered"]
    value: Any = None
    """`value`: the returned plain data, exact builtin types, after it crossed as type-tagged JSON."""
    type_name: str = ""
    """`raised`: the exception's type. `value` that is no plain data: the type's name, with `opaque=True`."""
    detail: str = ""
    opaque: bool = False
    bases: tuple[str, ...] = ()
    """`raised`: the names of the type and its bases, most derived first."""


@dataclass(slots=True)
class Observation:
    """What happened to one execution."""

    status: EndStatus
    answers: list[Answer] = field(default_factory=list)
    """One per call, also those before a crash; the rest `unanswered`."""
    exception: str = ""
    """`error`: exception type and short traceback."""
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None
    signal: int | None = None
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_memory_mb: float = 0.0
    peer: list[Answer] | None = None
    """With `Execution.peer`: one answer per test (`value` True = it held, `raised` = it did not, `unanswered`)."""
    detail: str = ""
    """For `sandbox_error`: what went wrong with us."""


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
