"""Tools in TRL's form, with a policy that says what it is told to."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from mrl.rollouts import TurnLimits
from mrl.rollouts.runner import Runner
from mrl.rollouts.tools.source import ToolSource
from mrl.types import Task
from tests.rollouts.offered import ASK, add, attempt, fail, later, results
from tests.rollouts.scripted import Scripted, call, setup


async def test_a_tool_is_called_and_its_result_is_seen() -> None:
    policy = Scripted([call("add", '{"a": 2, "b": 3}'), lambda prompt: "five" if "\n5\n" in prompt else "what?"])
    rollout = await attempt(policy, tools=[add])
    assert results(rollout) == ["5"]
    assert rollout.messages[-1] == {"role": "assistant", "content": "five"}
    assert [m["role"] for m in rollout.completion] == ["assistant", "tool", "assistant"]
    assert rollout.completion[0]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 2, "b": 3}}
    assert '"name": "add"' in policy.prompts()[0]
    assert "The first." in policy.prompts()[0]
    counts = {name: rollout.metrics[name] for name in ("turns", "turns_extended", "tool_calls", "tool_errors")}
    assert counts == {"turns": 2, "turns_extended": 1, "tool_calls": 1, "tool_errors": 0}
    assert len(rollout.samples) == 1


async def test_several_calls_are_answered_in_their_order() -> None:
    """Asynchronous ones run at the same time, beside the others."""
    calls = [call("later", f'{{"name": "{n}", "seconds": 0.2}}') for n in "abc"]
    calls.insert(1, call("add", '{"a": 1, "b": 1}'))
    start = time.perf_counter()
    rollout = await attempt(Scripted(["\n".join(calls), "done"]), tools=[add, later])
    assert results(rollout) == ["a", "2", "b", "c"]
    assert time.perf_counter() - start < 0.55, "three of 0.2 s, one after the other, take 0.6"
    assert len({m["tool_call_id"] for m in rollout.messages if m["role"] == "tool"}) == 4


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (call("fail", '{"why": "too bad"}'), "{'error': 'too bad'}"),
        (call("nothing"), "{'error': 'Tool nothing not found.'}"),
        (call("add", '{"a": 1}'), "missing 1 required positional argument: 'b'"),
        (call("add", '{"a": 1, "b": 2, "c": 3}'), "unexpected keyword argument 'c'"),
    ],
)
async def test_errors_go_to_the_policy(said: str, told: str) -> None:
    rollout = await attempt(Scripted([said, "sorry"]), tools=[add, fail])
    assert told in results(rollout)[0]
    assert (rollout.status, rollout.metrics["tool_errors"], rollout.metrics["turns"]) == ("ok", 1, 2)


@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError("no"), StopIteration("end")])
async def test_nothing_that_a_tool_raises_ends_the_run(error: BaseException) -> None:
    """Code that the policy wrote may call `exit()`."""

    def run(function: str) -> str:
        """
        Runs.

        Args:
            function: A name that is used inside.
        """
        assert function == "f"
        raise error

    async def runs(self: str) -> str:
        """
        Runs.

        Args:
            self: A name that is used inside.
        """
        assert self == "f"
        raise SystemExit(3)

    said = call("run", '{"function": "f"}') + call("runs", '{"self": "f"}')
    rollout = await attempt(Scripted([said, "sorry"]), tools=[run, runs])
    named = f"{type(error).__name__}: {error}"
    assert results(rollout) == [str({"error": named}), "{'error': 'SystemExit: 3'}"]


async def test_malformed_calls_are_counted() -> None:
    rollout = await attempt(Scripted(['<tool_call>\n{"name": "add", \n</tool_call>', "?"]), tools=[add])
    assert (rollout.metrics["malformed_calls"], rollout.metrics["tool_calls"]) == (1, 0)
    assert rollout.metrics["turns"] == 1  # there is nothing to answer
    both = '<tool_call>\n{"name"\n</tool_call>\n' + call("add", '{"a": 1, "b": 1}')
    rollout = await attempt(Scripted([both, "two"]), tools=[add])
    assert (rollout.metrics["malformed_calls"], results(rollout)) == (1, ["2"])


async def test_a_tool_that_says_too_much_fails_the_rollout_by_name() -> None:
    def read() -> str:
        """Reads."""
        return "x" * 10_000_000

    source = ToolSource.create(setup(), tools=[read])
    (group,) = await Runner(source, Scripted([call("read")])).run([Task("t", ASK)], 1, seed=0)
    assert group.rollouts[0].status == "failed"
    assert "read (" in group.rollouts[0].error
    assert "test_tools.py:" in group.rollouts[0].error
    assert (
        "returned 10,000,000 characters, and max_model_len leaves room for 320,000 at most" in group.rollouts[0].error
    )


async def test_a_slow_tool_ends_the_attempt() -> None:
    limits = TurnLimits(step_seconds=0.1)
    policy = Scripted([call("add", '{"a": 1, "b": 1}'), call("later", '{"name": "x", "seconds": 30}')])
    rollout = await attempt(policy, limits=limits, tools=[later, add])
    assert (rollout.limit, rollout.metrics["turns"]) == ("step_timeout", 2)


def test_tools_by_name(tmp_path: Path) -> None:
    path = tmp_path / "my_tools.py"
    path.write_text(
        'def shout(text: str) -> str:\n    """Shouts.\n\n    Args:\n        text: What.\n    """\n    return text\n'
    )
    source = ToolSource.create(setup(), tools=f"{path}:shout")
    assert list(source.tools) == ["shout"]
