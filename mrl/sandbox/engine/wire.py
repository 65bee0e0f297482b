"""Executions as the supervisor reads them, and its answers as observations."""

from __future__ import annotations

import functools
from dataclasses import asdict
from typing import Any, get_args

from mrl.sandbox import protocol
from mrl.sandbox.base import IOTest, Status, TestResult, Verdict
from mrl.sandbox.execution import Execution, Observation

MAX_TEXT = 2000
"""Characters of a detail; what a program printed has its own limit."""
_ESCAPED = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


_limits = functools.lru_cache(16)(asdict)  # most executions have the same


def encode_request(execution: Execution) -> bytes:
    request = {
        "code": execution.code,
        "stdin": execution.stdin,
        "tests": [asdict(test) if isinstance(test, IOTest) else test for test in execution.tests],
        "report": list(execution.report),
        "limits": _limits(execution.limits),
    }
    return protocol.dump(request)


def decode_observation(execution: Execution, data: dict[str, Any]) -> Observation:
    """What the supervisor says. Raises ValueError, TypeError, LookupError: it runs on a machine that a program may have
    taken over, where no layer holds."""
    status = data["status"]
    if status not in get_args(Status):
        raise ValueError(f"a status that is none: {str(status)[:100]!r}")
    if status == "sandbox_error":
        return Observation(Verdict(status, detail=printable(data["detail"])[:MAX_TEXT]))
    tests = [TestResult(passed is True, printable(detail)[:MAX_TEXT]) for passed, detail in data["tests"]]
    if len(tests) != len(execution.tests):
        raise ValueError("another number of results than tests")
    if status == "passed" and not all(test.passed for test in tests):
        raise ValueError("a pass without its tests")
    verdict = Verdict(
        status,
        tests,
        printable(data["detail"])[:MAX_TEXT],
        printable(data["stdout"]),
        printable(data["stderr"]),
        *(float(data[name]) for name in ("wall_seconds", "cpu_seconds", "peak_memory_mb")),
    )
    report = [None if text is None else str(text) for text in data["report"]]
    return Observation(verdict, report, data["exit_code"], data["signal"])


def not_run(detail: str) -> dict[str, Any]:
    """What is answered in the place of a supervisor that was of no use."""
    return {"status": "sandbox_error", "detail": detail}


def printable(text: str) -> str:
    """Without what a terminal obeys, and without halves of characters, which no file or database takes."""
    return text.translate(_ESCAPED).encode("utf-8", "backslashreplace").decode()
