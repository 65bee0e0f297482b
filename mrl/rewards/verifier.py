"""Verifiers from libraries, each answer in an isolated process of its own.

A library that checks answers may take for ever on one, may set signal handlers, which only a main thread can, and may
evaluate what the model wrote. So it is a program of the sandbox: it runs behind the same walls, in a fork of a process
that has imported the library and never seen an answer, within limits, and is asked twice. The first question is the
task's, and what goes wrong there is ours; the second is the answer, and what goes wrong there is the answer's.
"""

from __future__ import annotations

import ast
import asyncio
import importlib
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mrl.errors import RewardError, SandboxError
from mrl.sandbox.base import Limits
from mrl.sandbox.execution import Execution, Observation

MEMORY_MB = 2048
"""On top of what the libraries take."""
_CODE = """
from mrl.rewards.evaluating import close_interpreter
from {module} import {name}
judge = None
def begin():
    global judge
    judge = {name}(**task)
    return judge is not None
def answer():
    close_interpreter()
    return judge(text)
"""
_TESTS = ("begun = begin()", "assert begun is True", "said = answer()")
"""The same for all answers, so that one judge goes through them all."""
MAX_SAID = 10_000
"""Characters of what an answer's verifier says."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one answer. `asked` False: nothing is known of it, `detail` says why."""

    asked: bool
    value: Any = None
    """What the verifier says, plain data; None when it came to nothing."""
    detail: str = ""
    """Why it came to nothing: what was raised, or how the process ended."""


UNREADABLE = Outcome(False, detail="the task cannot be read")


class VerifierPool:
    """Asks one function, `module:name`, in isolated processes. It gets a task's fields and returns what judges an
    answer's text, or None when the task cannot be read. Both run in the isolated process; only plain data crosses.

    The module's `LIBRARIES` are imported once, before the first answer.
    """

    def __init__(self, function: str, seconds: float, size: int | None = None, layer: str = "auto") -> None:
        """seconds: wall and processor time for one answer, after which its process is killed. layer: of isolation."""
        module, _, name = function.partition(":")
        self.function, self._module = function, module
        self.size = size or max(min(4, (os.cpu_count() or 2) // 2), 1)
        self._code = _CODE.format(module=module, name=name)
        self._modules = (module, "mrl.rewards.evaluating", *importlib.import_module(module).LIBRARIES)
        self._limits = Limits(seconds, seconds, MEMORY_MB)
        self._layer = layer
        self._lock = threading.Lock()
        self._executor: Any = None
        self._closed = False

    async def ask_all(self, questions: Sequence[tuple[dict[str, Any], str]]) -> list[Outcome]:
        """Each task's and answer's outcome, in order. Raises RewardError where nothing isolates here."""
        executor = await asyncio.to_thread(self._started)
        executions = [
            Execution(f"{self._code}task, text = {task!r}, {text!r}", _TESTS, self._limits, report=("said",))
            for task, text in questions
        ]
        return [_outcome(observation) for observation in await executor.execute(executions)]

    async def prepare_all(self, name: str, tasks: Sequence[dict[str, Any]], seconds: float) -> list[Outcome]:
        """What the module's function `name` makes of each task, before any answer: once for all its answers. A value of
        None stands for what is no plain data. Raises RewardError as `ask_all` does."""
        executor = await asyncio.to_thread(self._started)
        code, limits = f"from {self._module} import {name}", Limits(seconds, seconds, MEMORY_MB)
        executions = [Execution(code, (f"made = {name}({task!r})",), limits, report=("made",)) for task in tasks]
        return [_prepared(observation) for observation in await executor.execute(executions)]

    def close(self) -> None:
        """End the processes."""
        with self._lock:
            self._closed = True
            if self._executor is not None:
                self._executor.shutdown()

    def _started(self) -> Any:
        if sys.platform != "linux":
            raise RewardError(
                f"the verifier {self.function} runs in isolation, which needs Linux, and this is {sys.platform}: run "
                "the reward worker on Linux (on Windows: inside WSL), or give a reward function of your own"
            )
        from mrl.sandbox.engine.client import IsolatedExecutor

        with self._lock:
            if self._closed:
                raise RewardError(f"the verifier {self.function} was closed")
            if self._executor is None:
                try:
                    executor = IsolatedExecutor(self.size, self._layer, modules=self._modules)
                except SandboxError as error:
                    raise RewardError(f"the verifier {self.function} does not start: {error}") from None
                # Libraries import parts of themselves at first use, and take what fails there for a wrong answer.
                opens = Execution(f"import {self._module} as home\nopen(home.__file__).close()", limits=self._limits)
                seen = executor.submit(opens).result()
                if seen.verdict.status != "passed":
                    executor.shutdown()
                    raise RewardError(
                        f"the verifier {self.function} does not start: in the isolation that works here (layer "
                        f"{executor.layer}) it cannot open its own files: {_end(seen)}. `mrl sandbox check` says what "
                        "the stronger layers lack"
                    )
                self._executor = executor
            return self._executor


def _prepared(seen: Observation) -> Outcome:
    if seen.verdict.status != "passed":
        said = "".join(test.detail for test in seen.verdict.tests)
        return Outcome(False, detail=_first_line(said) if _raised(said) else f"the verifier's process: {_end(seen)}")
    return Outcome(True, _value(seen))


def _outcome(seen: Observation) -> Outcome:
    tests = seen.verdict.tests
    if seen.verdict.status == "protocol":  # the task's own code does not break it
        return Outcome(True, detail=_end(seen))
    if not tests or not tests[0].passed:
        if tests and _raised(tests[0].detail):
            return Outcome(False, detail=_first_line(tests[0].detail))
        return Outcome(False, detail=f"the verifier's process: {_end(seen)}")
    if not tests[1].passed and tests[1].detail.startswith("begun is True"):
        return UNREADABLE
    if seen.verdict.status != "passed":
        raised = tests[2].detail
        return Outcome(True, detail=_first_line(raised) if _raised(raised) else _end(seen))
    value = _value(seen) if len((seen.report or [None])[0] or "") <= MAX_SAID else None
    return Outcome(True, value, "" if value is not None else "protocol: no score came back")


def _value(seen: Observation) -> Any:
    """A literal, as the judge wrote it; None where there is none."""
    text = seen.report[0] if seen.report else None
    try:
        return None if text is None else ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):  # nested deeper than is read here
        return None


def _end(seen: Observation) -> str:
    verdict = seen.verdict
    return verdict.status if verdict.status == "timeout" else f"{verdict.status} {verdict.detail}".strip()[:500]


def _raised(detail: str) -> bool:
    return ": raised " in detail


def _first_line(detail: str) -> str:
    """What was raised, without the lines of our own code around it."""
    return detail.partition(": raised ")[2].partition("\n")[0][:500]
