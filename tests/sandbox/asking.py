"""Calls of a program and what it answers, as tests that the sandbox runs."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mrl.sandbox.base import Limits, Verdict
from mrl.sandbox.engine.client import IsolatedExecutor
from mrl.sandbox.execution import Execution, Observation

NOTHING = "no plain data"


@dataclass(frozen=True)
class Call:
    function: str
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()


@dataclass
class Answer:
    kind: str
    """value, raised or unanswered."""
    value: Any = None
    type_name: str = ""
    detail: str = ""
    bases: tuple[str, ...] = ()


@dataclass
class Seen:
    verdict: Verdict
    answers: list[Answer] = field(default_factory=list)
    exit_code: int | None = None
    signal: int | None = None

    @property
    def status(self) -> str:
        """`done` where every call was answered, whatever with."""
        return "done" if self.verdict.status in ("passed", "failed") else self.verdict.status


def execution(code: str, calls: Sequence[Call] = (), limits: Limits = Limits(), stdin: str = "") -> Execution:  # noqa: B008
    """Each call is a test, which holds once it is answered."""
    tests = []
    for k, call in enumerate(calls):
        given = ", ".join([*map(repr, call.args), *(f"{name}={value!r}" for name, value in call.kwargs)])
        tests.append(
            f"answer_{k} = None\ntry: answer_{k} = ('value', {call.function}({given}))\n"
            f"except BaseException as error:\n"
            f"    answer_{k} = ('raised', [c.__name__ for c in type(error).__mro__], str(error)[:500])"
        )
    return Execution(code, tuple(tests), limits, stdin, tuple(f"answer_{k}" for k in range(len(tests))))


def seen(observation: Observation) -> Seen:
    verdict = observation.verdict
    answers = []
    for k, test in enumerate(verdict.tests):
        text = observation.report[k] if k < len(observation.report) else None
        said = ast.literal_eval(text) if text is not None else None
        if said is None:
            answers.append(Answer("value", NOTHING) if test.passed else Answer("unanswered", detail=test.detail))
        elif said[0] == "value":
            answers.append(Answer("value", said[1]))
        else:
            answers.append(Answer("raised", None, said[1][0], said[2], tuple(said[1])))
    return Seen(verdict, answers, observation.exit_code, observation.signal)


def ask(executor: IsolatedExecutor, code: str, *calls: Call, limits: Limits = Limits(), stdin: str = "") -> Seen:  # noqa: B008
    return seen(asyncio.run(executor.execute([execution(code, calls, limits, stdin)]))[0])
