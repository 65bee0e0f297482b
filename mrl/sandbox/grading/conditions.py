"""Whether a rewritten test holds, given what the program answered."""

from __future__ import annotations

from dataclasses import dataclass

from mrl.sandbox.base import TestResult
from mrl.sandbox.execution import Answer
from mrl.sandbox.grading.compare import Rejected, exception_matches, is_plain, show
from mrl.sandbox.grading.lower import evaluate
from mrl.sandbox.grading.rewrite import RewrittenTest
from mrl.sandbox.grading.walk import Holds, Raises, Returns

NOT_REACHED = "not reached"


class Undecided(Exception):
    """The answer is an object, or an exception type, that only the program's process knows. Says which."""


class _Unanswered(Exception):
    pass


@dataclass
class _Raised(Exception):
    answer: Answer


def decide(test: RewrittenTest, answers: list[Answer], finished: bool) -> TestResult:
    """answers: of all the program's calls. finished: the program ran to its end. Raises Undecided."""
    assert test.steps is not None
    if test.first == test.end and not finished and not any(map(_answered, answers[test.end - 1 : test.end])):
        return TestResult(False, NOT_REACHED)  # it asks nothing: it counts once what comes before it was answered
    for step in test.steps:
        try:
            detail = _check(step, answers)
        except _Unanswered:
            return TestResult(False, NOT_REACHED)
        except _Raised as error:
            detail = f"{step.text}: raised {_describe(error.answer)}"
        if detail:
            return TestResult(False, detail[:1500])
    return TestResult(True)


def _check(step: Holds | Returns | Raises, answers: list[Answer]) -> str:
    """Why the step fails, or ""."""
    if isinstance(step, Holds):
        return _holds(step, answers)
    answer = _get(answers, step.hole)
    if isinstance(step, Returns):
        if answer.kind == "raised":
            raise _Raised(answer)
        return ""
    if answer.kind != "raised":
        return f"{step.text}: raised nothing, expected {' or '.join(step.types)}" if step.required else ""
    matches = _caught(answer, step.types)
    if matches is None:
        raise Undecided(f"the exception {answer.type_name}")
    return "" if matches else f"{step.text}: raised {_describe(answer)}, expected {' or '.join(step.types)}"


def _holds(step: Holds, answers: list[Answer]) -> str:
    def value_of(index: int) -> object:
        answer = _get(answers, index)
        if answer.kind == "raised":
            raise _Raised(answer)
        if answer.opaque:
            raise Undecided(f"a {answer.type_name}")
        if not is_plain(answer.value):
            raise Rejected("an answer that is no plain data")
        return answer.value

    try:
        if evaluate(step.code, step.values, value_of):
            return ""
    except (_Raised, _Unanswered, Undecided):
        raise
    except Exception as error:  # the comparison itself fails on this data: `None < 3`, too deep, too large
        return f"{step.text}: {type(error).__name__}: {str(error)[:200]}{_got(step, answers)}"
    return f"{step.text}: false{_got(step, answers)}"


def _got(step: Holds, answers: list[Answer]) -> str:
    values = [show(answers[index].value) for index in dict.fromkeys(step.holes) if answers[index].kind == "value"]
    return f"; got {', '.join(values[:8])}" if values else ""


def _caught(answer: Answer, types: tuple[str, ...]) -> bool | None:
    if answer.bases:
        wanted = {name.rpartition(".")[2] for name in types}
        return not wanted.isdisjoint(name.rpartition(".")[2] for name in answer.bases)
    return exception_matches(answer.type_name, types)


def _get(answers: list[Answer], index: int) -> Answer:
    if index >= len(answers) or not _answered(answers[index]):
        raise _Unanswered
    return answers[index]


def _answered(answer: Answer) -> bool:
    return answer.kind != "unanswered"


def _describe(answer: Answer) -> str:
    name = answer.type_name or "an exception"
    return answer.detail if answer.detail.startswith(name) else f"{name}: {answer.detail}".rstrip(": ")
