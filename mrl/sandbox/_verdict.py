"""From what a supervisor reports of a process to a verdict. Pure: no process, no file."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass, field
from typing import Any

from mrl.sandbox.base import IOTest, Limits, Status, TestResult, Verdict
from mrl.sandbox.grading.compare import compare_output

_RECORD = re.compile(r"(?P<nonce>[0-9a-f]{16}) (?P<kind>[SEMXPFGD]) (?P<index>\d{1,6})(?: (?P<detail>[ -~]*))?")
_OWN_SIGNALS = {"SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGTRAP", "SIGSYS", "SIGPIPE"}
NOT_REACHED = "not reached"
Record = tuple[str, int, str]
"""Kind, index, detail: see `_child`."""


@dataclass(slots=True)
class Run:
    """One process of a program: what it was for, and what became of it."""

    indices: list[int]
    """The program's tests it decides."""
    io: IOTest | None = None
    script: bool = False
    """It runs to its end as a script, without assert tests."""
    nonce: str = ""
    status: Status = "passed"
    detail: str = ""
    tests: list[TestResult] = field(default_factory=list)
    stdout: str = ""
    stderr: str = ""
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_memory_mb: float = 0.0


def not_judged(detail: str) -> Verdict:
    """The sandbox failed: nothing is known of the program."""
    return Verdict("sandbox_error", detail=detail)


def run_from_report(run: Run, report: dict[str, Any], limits: Limits) -> None:
    """Fill `run` from a supervisor's report."""
    for name in ("stdout", "stderr", "wall_seconds", "cpu_seconds", "peak_memory_mb"):
        setattr(run, name, report[name])
    records = _parse(report["records"], run)
    if records is None:
        run.status, run.detail = "protocol", f"unreadable result: {report['records'][:200]!r}"
        return
    refused = [detail for kind, _, detail in records if kind == "S"]
    if refused or not report["clean"]:
        run.status = "sandbox_error"
        run.detail = refused[0] if refused else "some processes of the program could not be killed"
        return
    by_index = {index: (kind, detail) for kind, index, detail in records if kind in "PFG"}
    if not run.script:
        run.tests = [_result(*by_index.get(k, ("", NOT_REACHED))) for k in range(len(run.indices))]
    run.status, run.detail = _status(run, records, report, limits)
    if run.script:
        _judge_output(run)


def merge_runs(runs: list[Run], count: int) -> Verdict:
    """One verdict of all runs: status and output of the first that did not pass, tests in the program's order."""
    worst = next((run for run in runs if run.status != "passed"), runs[-1])
    tests = [TestResult(False, NOT_REACHED) for _ in range(count)]
    for run in runs:
        for index, test in zip(run.indices, run.tests, strict=False):
            tests[index] = test
    return Verdict(
        worst.status,
        tests,
        worst.detail,
        worst.stdout,
        worst.stderr,
        wall_seconds=sum(run.wall_seconds for run in runs),
        cpu_seconds=sum(run.cpu_seconds for run in runs),
        peak_memory_mb=max(run.peak_memory_mb for run in runs),
    )


def _parse(text: str, run: Run) -> list[Record] | None:
    """The records in order, or None when they are not what our harness writes: each test at most once, in order."""
    records: list[Record] = []
    *lines, rest = text.split("\n")
    last = -1
    for line in lines:
        match = _RECORD.fullmatch(line)
        if match is None or match["nonce"] != run.nonce:
            return None
        kind, index = match["kind"], int(match["index"])
        if kind in "PFG":
            if index != last + 1 or index >= len(run.indices) or run.script:
                return None
            last = index
        records.append((kind, index, _unescape(match["detail"] or "")))
    return None if rest else records


def _unescape(detail: str) -> str:
    try:
        return detail.encode("ascii").decode("unicode_escape")
    except UnicodeDecodeError:  # cut in the middle of an escape
        return detail


def _result(kind: str, detail: str) -> TestResult:
    return TestResult(passed=kind == "P", detail=detail)


def _status(run: Run, records: list[Record], report: dict[str, Any], limits: Limits) -> tuple[Status, str]:
    kinds = {kind: (index, detail) for kind, index, detail in records}
    if report["stopped"] == "timeout":
        return "timeout", f"no end after {limits.wall_seconds:g} s"
    if report["stopped"] == "output_limit" or len(report["stdout"]) + len(report["stderr"]) > limits.output_bytes:
        return "output_limit", f"more than {limits.output_bytes} bytes of output"
    if report["stopped"] == "protocol":
        return "protocol", "too many results"
    if "M" in kinds or "G" in kinds:
        return "memory", f"MemoryError (limit {limits.memory_mb} MB)"
    if "E" in kinds:
        return "error", kinds["E"][1]
    if "X" in kinds:
        return "exited", f"sys.exit({kinds['X'][0]}) before the tests were done"
    if os.WIFSIGNALED(report["status"]):
        return _signalled(os.WTERMSIG(report["status"]), run, limits)
    code = os.WEXITSTATUS(report["status"])
    if run.script:
        return ("exited", f"exit code {code}") if code else ("passed", "")
    if "D" not in kinds or any(test.detail == NOT_REACHED for test in run.tests):
        return "exited", f"left with exit code {code} before the tests were done"
    failed = [test for test in run.tests if not test.passed]
    return ("failed", failed[0].detail) if failed else ("passed", "")


def _signalled(number: int, run: Run, limits: Limits) -> tuple[Status, str]:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    if name == "SIGXCPU" or (name == "SIGKILL" and run.cpu_seconds >= limits.cpu_seconds):
        return "timeout", f"used more than {limits.cpu_seconds:g} s of processor time"
    return ("crashed" if name in _OWN_SIGNALS else "killed"), name


def _judge_output(run: Run) -> None:
    if run.io is None:
        return
    if run.status != "passed":
        run.tests = [TestResult(False, run.detail)]
        return
    run.detail = compare_output(run.io, run.stdout)
    run.tests = [TestResult(not run.detail, run.detail)]
    run.status = "failed" if run.detail else "passed"
