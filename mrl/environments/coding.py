"""`coding`: the policy tries programs in the sandbox, and hands one in, which the task's tests judge."""

from __future__ import annotations

import asyncio
import atexit
import threading
from random import Random
from typing import Any

from mrl.environments.base import playing, setting
from mrl.errors import DataError, SandboxError
from mrl.rewards.code import COLUMNS, extract_code, parse_tests
from mrl.sandbox import IOTest, Limits, Program, Sandbox, Verdict, make_factory

SHOWN = 4000
"""Characters of what a program printed, and of its traceback."""
_started: dict[tuple[str, str], Sandbox] = {}
_starting = threading.Lock()


class Coding:
    """Python, with the tests in the column `testcases` (docs/rewards.md), which the policy does not see."""

    def __init__(
        self, partial: bool = True, seconds: float = 10.0, sandbox: str | Sandbox = "auto", **sandbox_options: Any
    ) -> None:
        """partial: the reward is the share of the tests passed; else 1 for all of them and 0 for fewer. seconds: of
        wall and processor that a program may take. sandbox: by name, with its options (docs/sandbox.md), or one."""
        self.default_partial = partial
        self.limits = Limits(wall_seconds=seconds, cpu_seconds=seconds)
        self._sandbox, self._options = sandbox, tuple(sorted(sandbox_options.items()))
        self.done, self.failure = False, ""
        self.verdict: Verdict | None = None

    def reset(self, testcases: Any = None, testcase: Any = None, partial: bool | None = None, **columns: Any) -> str:
        """testcases: the tests. Raises DataError for none, or for such as cannot be read."""
        given = setting(testcases, testcase)
        if given is None:
            raise DataError(f"coding: the task has no tests: no column {' or '.join(COLUMNS)}")
        self.tests = parse_tests(given)
        self.partial = setting(partial, self.default_partial)
        self.done, self.failure, self.verdict = False, "", None
        return "\nTry programs with the tool `run_code`; hand in the solution, once, with `submit`."

    def run_code(self, code: str, stdin: str = "") -> str:
        """
        Runs a Python program and returns what it printed.

        Args:
            code: The program.
            stdin: What it can read from standard input.
        """
        playing(self.done)
        # A program without a test has nothing to be judged by; this one's output is looked at here, not compared.
        verdict = self._run(Program(extract_code(code), (IOTest(stdin, ""),), self.limits))
        ended = "" if verdict.status in ("passed", "failed") else f"[{verdict.status}] {_end(verdict.detail)}".strip()
        return "\n".join(filter(None, (_end(verdict.stdout), _end(verdict.stderr), ended))) or "[nothing printed]"

    def submit(self, code: str) -> str:
        """
        Hands in the solution. It is judged, and nothing can be done after it.

        Args:
            code: The whole program.
        """
        playing(self.done)
        self.verdict = self._run(Program(extract_code(code), self.tests, self.limits))
        self.done = True
        passed = sum(test.passed for test in self.verdict.tests)
        return f"{passed} of {len(self.tests)} tests passed."

    def get_reward(self) -> float:
        """0 until something was handed in. Raises SandboxError when the sandbox failed: nothing is known then."""
        if self.failure:
            raise SandboxError(self.failure)
        if self.verdict is None:
            return 0.0
        return self.verdict.fraction_passed if self.partial else float(self.verdict.status == "passed")

    @classmethod
    def tasks(cls, count: int, seed: int = 0) -> list[dict[str, Any]]:
        """Rows of a dataset: of the tasks of `tiny-code`. Raises DataError for more than there are."""
        from mrl.starter import load_tasks

        shipped = load_tasks("train")
        if count > len(shipped):
            raise DataError(f"coding: {count} tasks are more than the {len(shipped)} that are shipped")
        drawn = Random(seed).sample(shipped, count)
        return [
            {"prompt": [{"role": "user", "content": task["prompt"]}], "testcases": task["testcases"]} for task in drawn
        ]

    # --- inner ------------------------------------------------------------------------------------------------------

    def _given_or_shared(self) -> Sandbox:
        return _shared(self._sandbox, self._options) if isinstance(self._sandbox, str) else self._sandbox

    def _run(self, program: Program) -> Verdict:
        try:
            verdict = asyncio.run(self._given_or_shared().run([program]))[0]
        except SandboxError as error:
            self.failure, self.done = str(error), True
            raise
        if not verdict.judged:
            self.failure, self.done = f"the sandbox failed: {verdict.detail}", True
            raise SandboxError(self.failure)
        return verdict


def _shared(name: str, options: tuple[tuple[str, Any], ...]) -> Sandbox:
    """One for all of a process's environments, until its end."""
    key = (name, repr(options))
    with _starting:
        if key not in _started:
            sandbox = _started[key] = make_factory(name, dict(options))()
            atexit.register(_end_of, sandbox)
        return _started[key]


def _end_of(sandbox: Sandbox) -> None:
    """At the end of the process, when nothing can be handed to other threads any more: `close` may do so."""
    if hasattr(sandbox, "shutdown"):
        sandbox.shutdown()
    else:
        asyncio.run(sandbox.close())


def _end(text: str) -> str:
    """The end of a long text, where an exception's reason is."""
    text = text.rstrip()
    return text if len(text) <= SHOWN else f"[…] {text[-SHOWN:]}"
