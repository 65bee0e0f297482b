"""Tools and environments that do what no function should: the run goes on, and what others have stays as it was."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from mrl.rollouts.tools.source import ToolSource
from mrl.types import Rollout, Task
from tests.rollouts.offered import ASK, results
from tests.rollouts.scripted import Scripted, call, setup


def leave(code: int) -> str:
    """
    Ends the process.

    Args:
        code: Its exit code.
    """
    sys.exit(code)


async def leave_later(code: int) -> str:
    """
    Ends the process.

    Args:
        code: Its exit code.
    """
    sys.exit(code)


def plot(function: str, self: int = 0) -> str:
    """
    Has parameters of names that others use.

    Args:
        function: What is drawn.
        self: A number.
    """
    return f"{function} {self}"


def sort(numbers: list[int]) -> list[int]:
    """
    Sorts in place.

    Args:
        numbers: What is sorted.
    """
    numbers.sort()
    return numbers


def half() -> str:
    """Says half a surrogate pair, which no tokenizer takes."""
    return "a\ud800b"


class Deals:
    """Takes the column apart."""

    def reset(self, cards: list[str], **columns: Any) -> str:
        return cards.pop()


class Leaves:
    """Its asynchronous methods call `exit()`."""

    async def reset(self, when: str, **columns: Any) -> None:
        if when == "reset":
            sys.exit(4)

    async def get_reward(self) -> float:
        sys.exit(5)


async def said(text: str, **options: Any) -> Rollout:
    policy = Scripted([text, "done"])
    return await ToolSource.create(setup(), **options).run(Task("t", ASK), 0, policy, 1)


async def test_one_that_exits_is_answered_with_an_error() -> None:
    for tool, told in ((leave, "SystemExit: 3"), (leave_later, "SystemExit: 3")):
        rollout = await said(call(tool.__name__, '{"code": 3}'), tools=[tool])
        assert results(rollout) == [f"{{'error': '{told}'}}"]
        assert rollout.metrics["tool_errors"] == 1


@pytest.mark.parametrize(("when", "code"), [("reset", 4), ("get_reward", 5)])
async def test_an_environment_that_exits_fails_its_attempt(when: str, code: int) -> None:
    source = ToolSource.create(setup(), environment_factory=Leaves)
    with pytest.raises(RuntimeError, match=f"SystemExit: {code}"):
        await source.run(Task("t", ASK, {"when": when}), 0, Scripted(["no"]), 1)


async def test_parameters_may_have_any_name() -> None:
    rollout = await said(call("plot", '{"function": "sin", "self": 2}'), tools=[plot])
    assert results(rollout) == ["sin 2"]


async def test_what_the_policy_said_is_recorded_as_it_was() -> None:
    rollout = await said(call("sort", '{"numbers": [3, 1]}'), tools=[sort])
    assert results(rollout) == ["[1, 3]"]
    assert rollout.completion[0]["tool_calls"][0]["function"]["arguments"] == {"numbers": [3, 1]}


async def test_a_reset_that_changes_its_columns_leaves_those_of_other_attempts() -> None:
    source = ToolSource.create(setup(), environment_factory=Deals)
    task = Task("t", ASK, {"cards": [" ace", " ten"]})
    prompts = [(await source.run(task, attempt, Scripted(["no"]), 1)).messages[0]["content"] for attempt in (0, 1)]
    assert prompts == ["go ten", "go ten"]
    assert task.columns == {"cards": [" ace", " ten"]}


async def test_text_that_no_tokenizer_takes() -> None:
    assert results(await said(call("half"), tools=[half])) == ["a?b"]
