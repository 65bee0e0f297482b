"""Code tests as a reward: take the code out of a completion, run it in a sandbox, count the tests it passes."""

from __future__ import annotations

import ast
import asyncio
import atexit
import functools
import json
import os
import string
import threading
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, get_args

from mrl.errors import DataError, RewardError
from mrl.rewards.base import RewardRequest, Scores, completion_text
from mrl.rewards.formats import parse_item, parse_table
from mrl.sandbox.base import IOTest, Limits, Program, Sandbox, Status, Test, Verdict
from mrl.types import Message

COLUMNS = ("testcases", "testcase")
Completion = str | list[Message]


def compute_reward(
    completion: Completion, testcase: Any, *, sandbox: Sandbox | None = None, limits: Limits | None = None
) -> float | None:
    """1.0 when the completion's code passes every test, else 0.0; `None` when the sandbox failed and nothing is known.

    testcase: see `parse_tests`. Blocks until it is judged; works where an event loop is running. Raises DataError.
    """
    return _value(_judge([completion], [testcase], sandbox, limits)[0], partial=False)


def compute_reward_with_partial_credit(
    completion: Completion, testcase: Any, *, sandbox: Sandbox | None = None, limits: Limits | None = None
) -> float | None:
    """Share of the tests that the completion's code passes, in [0, 1]. Otherwise as `compute_reward`."""
    return _value(_judge([completion], [testcase], sandbox, limits)[0], partial=True)


def reward_helper_function(
    completions: Sequence[Completion],
    testcases: Sequence[Any],
    *,
    sandbox: Sandbox | None = None,
    limits: Limits | None = None,
) -> list[float | None]:
    """`compute_reward` of each pair, in parallel; for reward functions of your own. Raises DataError naming the row."""
    if len(completions) != len(testcases):
        raise DataError(f"{len(completions)} completions but {len(testcases)} testcases; give one for each")
    return [_value(verdict, partial=False) for verdict in _judge(completions, testcases, sandbox, limits)]


class CodeReward:
    """0 or 1 from the dataset column `testcases` (or `testcase`). A time-out, a crash or an exit is 0; a failure of the
    sandbox, or tests that cannot be read, leave the row without a reward."""

    partial = False
    bounded = True  # by each program's limits
    independent = True
    logged = tuple(f"sandbox/{status}" for status in get_args(Status))

    def __init__(self, sandbox: Sandbox | None = None, limits: Limits | None = None, name: str = "sandbox") -> None:
        """sandbox: default, one for the whole process, as `sandbox: auto` makes it."""
        self.name = name
        self._sandbox, self._limits = sandbox, limits or Limits()

    def check_columns(self, columns: Iterable[str]) -> None:
        """Raises RewardError when the dataset has no tests."""
        columns = list(columns)
        if not set(COLUMNS) & set(columns):
            raise RewardError(
                f"reward_funcs: {self.name!r} runs code against the dataset column 'testcases' (or 'testcase');"
                f" not among the columns: {', '.join(columns) or 'none'}. Rename one, or give your own reward function"
            )

    def check_rows(self, rows: Iterable[tuple[str, dict[str, Any]]]) -> None:
        """rows: task id and columns. Raises DataError naming the first task whose tests cannot be read."""
        for task_id, columns in rows:
            column = next((name for name in COLUMNS if name in columns), None)
            if column is not None:
                parse_tests(columns[column], row=task_id)

    async def score(self, requests: list[RewardRequest], *, trainer_state: Any) -> Scores:
        """Run every completion's code. Raises RewardError when no column has tests."""
        programs: dict[int, Program] = {}
        scores = Scores([None] * len(requests))
        for row, request in enumerate(requests):
            self.check_columns(request.columns)
            column = next(name for name in COLUMNS if name in request.columns)
            try:
                tests = parse_tests(request.columns[column], row=row)
                programs[row] = Program(extract_code(completion_text(request.completion)), tests, self._limits)
            except DataError as error:
                scores.errors[row] = f"{self.name}: {error}"
        verdicts = dict(zip(programs, await (self._sandbox or _shared()).run(list(programs.values())), strict=True))
        for row, verdict in verdicts.items():
            scores.values[row] = _value(verdict, self.partial)
            if not verdict.judged:
                scores.errors[row] = f"{self.name} could not judge it: {verdict.detail}"
        if verdicts:
            counts = [verdict.status for verdict in verdicts.values()]
            scores.metrics = {f"sandbox/{s}": [counts.count(s) / len(counts)] for s in get_args(Status)}
        scores.extra["verdict"] = [_summary(verdicts.get(row)) for row in range(len(requests))]
        return scores


class PartialCodeReward(CodeReward):
    """As `CodeReward`, but the share of tests passed."""

    partial = True

    def __init__(
        self, sandbox: Sandbox | None = None, limits: Limits | None = None, name: str = "sandbox_partial"
    ) -> None:
        super().__init__(sandbox, limits, name)


TAG = string.ascii_letters + string.digits + "_+.-"
"""Characters of a fence's tag."""


def extract_code(text: str) -> str:
    """The code in a completion: its last fenced block tagged python (`python`, `py`, `python3`), else its last fenced
    block, else all of it. A block that is never closed (a completion cut short) counts only when no other block is.

    Linear time, whatever the text: it runs beside the training."""
    closed: list[tuple[bool, str]] = []
    tagged, fence, block = False, "", None
    for line in text.splitlines():
        if block is None:
            fence, tag = _opening(line)
            if fence:
                tagged, block = tag.lower() in ("python", "py", "python3"), list[str]()
        elif line.rstrip().endswith(fence):
            before = line.rstrip()[: -len(fence)]
            if before.strip():
                block.append(before)
            closed.append((tagged, "\n".join(block)))
            block = None
        else:
            block.append(line)
    blocks = [code for is_python, code in closed if is_python] or [code for _, code in closed]
    if not blocks and block is not None:
        blocks = ["\n".join(block)]
    return _dedent(blocks[-1]) if blocks else text


def _dedent(code: str) -> str:
    """`textwrap.dedent`, which makes a pattern as long as the margin: some tenths of a second for a long one."""
    lines = [line if line.strip(" \t") else "" for line in code.split("\n")]
    margins = [line[: len(line) - len(line.lstrip(" \t"))] for line in lines if line]
    margin = os.path.commonprefix(margins)  # noqa: RUF071  (of characters is what is meant)
    return "\n".join(line.removeprefix(margin) for line in lines)


def _opening(line: str) -> tuple[str, str]:
    """The fence and the tag that a line ends with; "" where it ends with none. Read from the end: a pattern that looks
    for the fence from the start takes the cube of a long run of spaces."""
    line = line.rstrip(" \t")
    before = line.rstrip(TAG)
    tag = line[len(before) :]
    before = before.rstrip(" \t")
    mark = before[-1:]
    fence = before[len(before.rstrip(mark)) :] if mark in ("`", "~") else ""
    return (fence, tag) if len(fence) >= 3 else ("", "")


def parse_tests(testcase: Any, row: int | str | None = None) -> tuple[Test, ...]:
    """The tests a dataset cell holds.

    A string of Python: each top-level `assert` is a test, together with the statements before it. A list of strings:
    each is one test. A list of `{"input": …, "output": …}`: the program is run with `input` on stdin. Either list may
    be given as JSON. Raises DataError, naming `row` when given, for anything else and for tests that assert nothing.
    """
    try:
        if isinstance(testcase, str):
            return _parse_text(testcase)
        return _parse_items(testcase)
    except DataError as error:
        raise DataError(f"testcases{'' if row is None else f' of row {row}'}: {error}") from None


@functools.lru_cache(maxsize=4096)
def _parse_text(text: str) -> tuple[Test, ...]:
    if text.lstrip().startswith(("[", "{")):
        try:
            return _parse_items(json.loads(text))
        except ValueError:  # no JSON; Python may start with a bracket too
            pass
    lines = text.splitlines(keepends=True)
    tests, start = [], 0
    statements = _parse_python(text).body
    for node in statements:
        if isinstance(node, ast.Assert):
            tests.append("".join(lines[start : node.end_lineno]))
            start = node.end_lineno or start
    rest = "".join(lines[start:])
    if rest.strip() and _asserts(_parse_python(rest)):
        tests.append(rest)
    if not tests:
        raise DataError("there is no test; write lines that `assert` something of the program's names")
    return tuple(tests)


def _parse_items(items: Any) -> tuple[Test, ...]:
    items = items.tolist() if hasattr(items, "tolist") else items
    if isinstance(items, dict) and "inputs" in items:
        return parse_table(items)
    if not isinstance(items, list | tuple):
        raise DataError(f"expected assert lines or a list, got {type(items).__name__}")
    if not items:
        raise DataError("the list is empty")
    return tuple(_parse_item(number, item) for number, item in enumerate(items))


def _parse_item(number: int, item: Any) -> Test:
    if isinstance(item, IOTest):
        return item
    if isinstance(item, str):
        if not _asserts(_parse_python(item)):
            raise DataError(f"test {number} asserts nothing: {item[:80]!r}")
        return item
    if isinstance(item, dict):
        try:
            test = parse_item(item)
        except DataError as error:
            raise DataError(f"test {number}: {error}") from None
        if test is not None:
            return test
    raise DataError(f'test {number} is neither a string nor {{"input": str, "output": str}}: {str(item)[:80]!r}')


@functools.lru_cache(maxsize=4096)
def _parse_python(text: str) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DataError(f"not Python: {error}") from None


def _asserts(tree: ast.Module) -> bool:
    """Whether running it can fail because of the program: it asserts, raises or calls outside of a mere definition, or
    defines what a test runner would run."""
    return any(
        _is_run(node) and isinstance(inner, ast.Assert | ast.Raise | ast.Call)
        for node in tree.body
        for inner in ast.walk(node)
    )


def _is_run(node: ast.stmt) -> bool:
    if isinstance(node, ast.ClassDef):
        return any(ast.unparse(base).endswith("TestCase") for base in node.bases)
    return not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("test")


def _judge(
    completions: Sequence[Completion], testcases: Sequence[Any], sandbox: Sandbox | None, limits: Limits | None
) -> list[Verdict]:
    single = len(testcases) == 1
    programs = [
        Program(extract_code(completion_text(c)), parse_tests(t, row=None if single else row), limits or Limits())
        for row, (c, t) in enumerate(zip(completions, testcases, strict=True))
    ]
    return _run_blocking(sandbox or _shared(), programs)


def _run_blocking(sandbox: Sandbox, programs: list[Program]) -> list[Verdict]:
    """`sandbox.run` from synchronous code; in a thread of its own, because the caller's may have a running loop."""
    outcome: list[Any] = []

    def work() -> None:
        try:
            outcome.append(asyncio.run(sandbox.run(programs)))
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=work, name="mrl-code-tests", daemon=True)
    thread.start()
    thread.join()
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


@functools.cache
def _shared() -> Sandbox:
    """For callers that bring no sandbox: started once, ends with the process."""
    from mrl.sandbox.local import make_auto

    sandbox = make_auto()
    atexit.register(sandbox.shutdown)
    return sandbox


def _value(verdict: Verdict, partial: bool) -> float | None:
    if not verdict.judged:
        return None
    return verdict.fraction_passed if partial else float(verdict.status == "passed" and bool(verdict.tests))


def _summary(verdict: Verdict | None) -> dict[str, Any] | None:
    if verdict is None:
        return None
    failing = next((f"test {k}: {t.detail}" for k, t in enumerate(verdict.tests) if not t.passed), "")
    return {
        "status": verdict.status,
        "passed": sum(test.passed for test in verdict.tests),
        "tests": len(verdict.tests),
        "detail": (verdict.detail or failing)[:500],
        "failing": failing[:500],
        "wall_seconds": round(verdict.wall_seconds, 4),
    }
