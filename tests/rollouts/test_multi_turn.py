"""Attempts of several turns end where they are done or at a limit, with the reward they have by then."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from mrl.errors import EngineError, EnvError
from mrl.rollouts import TurnLimits
from mrl.rollouts.chat import AssistantTurn, chat_format
from mrl.rollouts.multi_turn import Step, play
from mrl.types import Completion, Message, Rollout, Task, derive_seed
from tests.rollouts.chat_templates import tokenizer_of
from tests.rollouts.scripted import STYLE, Scripted, setup


@dataclass
class Counting:
    """Answers with the number of the turn, which is its reward too, and ends after `lasts` turns."""

    lasts: int = 100
    takes: float = 0.0
    begins_in: float = 0.0
    pays_steps: bool = True
    final: float | None = None
    tools: list[Any] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=dict)
    heard: list[str] = field(default_factory=list)

    async def begin(self) -> list[Message]:
        await asyncio.sleep(self.begins_in)
        return [{"role": "user", "content": "begin"}]

    async def step(self, turn: AssistantTurn) -> Step:
        self.heard.append(turn.content)
        number = len(self.heard)
        await asyncio.sleep(self.takes if number > 1 else 0)
        answer: Message = {"role": "user", "content": f"number {number}"}
        return Step([answer], float(number) if self.pays_steps else None, done=number >= self.lasts)

    async def rewards(self) -> dict[str, float | None]:
        return {} if self.final is None else {"final": self.final}


async def attempt(
    episode: Counting, policy: Scripted, limits: TurnLimits | None = None, prompt: Any = "begin", **sampling: Any
) -> Rollout:
    chat = chat_format(tokenizer_of(STYLE))
    return await play(episode, chat, setup(limits, **sampling), Task("t", prompt), 3, policy, seed=11)


async def test_turns_until_the_environment_is_done() -> None:
    episode, policy = Counting(lasts=3, final=0.5), Scripted(["one", "two", "three"])
    rollout = await attempt(episode, policy)
    assert episode.heard == ["one", "two", "three"]
    assert (rollout.limit, rollout.truncated, rollout.status) == ("", False, "ok")
    assert rollout.step_rewards == [1.0, 2.0, 3.0]
    assert rollout.rewards == {"environment": 6.0, "final": 0.5}
    assert rollout.reward is None  # joined with what reward functions say
    assert [m["content"] for m in rollout.messages] == [
        "begin",
        "one",
        "number 1",
        "two",
        "number 2",
        "three",
        "number 3",
    ]
    assert rollout.completion == "three"
    (sample,) = rollout.samples
    lengths = [len(r.prompt_ids) for r in policy.requests]
    assert lengths == sorted(lengths)
    assert rollout.num_tokens == sample.num_sampled == sum(sample.mask) < len(sample.mask)
    assert (rollout.metrics["turns"], rollout.metrics["turns_extended"]) == (3, 2)
    assert [r.seed for r in policy.requests] == [derive_seed(11, turn) for turn in range(3)]
    assert {r.session for r in policy.requests} == {"t#3"}
    assert sample.policy_version[0] == 0
    assert sample.policy_version[-1] == 2


async def test_messages_are_answered_with_messages() -> None:
    prompt = [{"role": "user", "content": "begin"}]
    rollout = await attempt(Counting(lasts=2), Scripted(["one", "two"]), prompt=prompt)
    assert rollout.prompt == prompt
    assert [m["role"] for m in rollout.completion] == ["assistant", "user", "assistant", "user"]


async def test_an_environment_without_rewards_by_step_has_none() -> None:
    rollout = await attempt(Counting(lasts=2, pays_steps=False), Scripted(["one"]))
    assert rollout.step_rewards == []
    assert rollout.rewards == {}


async def test_max_turns() -> None:
    rollout = await attempt(Counting(), Scripted(["one"]), TurnLimits(turns=2))
    assert (rollout.limit, rollout.truncated, rollout.metrics["turns"]) == ("max_turns", True, 2)
    assert rollout.rewards == {"environment": 3.0}
    assert rollout.samples[-1].finish_reason == "length"


async def test_max_turns_is_no_limit_where_the_environment_is_done_with_it() -> None:
    assert (await attempt(Counting(lasts=2), Scripted(["one"]), TurnLimits(turns=2))).limit == ""


async def test_tokens_of_a_turn() -> None:
    policy = Scripted(["x", "a very long answer " * 5])
    rollout = await attempt(Counting(), policy, TurnLimits(turn_tokens=6))
    assert rollout.limit == "max_tokens"
    assert rollout.metrics["turns"] == 2
    assert rollout.step_rewards == [1.0]  # what was cut is not said to the environment
    assert [r.sampling.max_tokens for r in policy.requests] == [6, 6]


async def test_tokens_of_a_rollout_are_those_that_were_sampled() -> None:
    """The environment's own tokens do not count."""
    policy = Scripted(["abcd"])
    rollout = await attempt(Counting(), policy, TurnLimits(rollout_tokens=12))
    each = rollout.samples[0].mask.index(0)
    assert rollout.limit == "max_rollout_tokens"
    assert rollout.num_tokens == 12
    assert [r.sampling.max_tokens for r in policy.requests] == [12, 12 - each, 12 - 2 * each]


async def test_exactly_as_many_tokens_as_there_may_be() -> None:
    rollout = await attempt(Counting(), Scripted(["abcd"]), TurnLimits(rollout_tokens=5))
    assert (rollout.limit, rollout.metrics["turns"], rollout.step_rewards) == ("max_rollout_tokens", 1, [1.0])


async def test_the_context_is_a_limit() -> None:
    policy = Scripted(["abcd"], max_model_len=120)
    rollout = await attempt(Counting(), policy)
    assert rollout.limit == "max_model_len"
    assert all(len(r.prompt_ids) < 120 for r in policy.requests)
    (sample,) = rollout.samples
    assert len(sample.prompt_ids) + len(sample.completion_ids) <= 120


async def test_seconds_of_a_step() -> None:
    rollout = await attempt(Counting(takes=30, final=0.25), Scripted(["one"]), TurnLimits(step_seconds=0.05))
    assert (rollout.limit, rollout.step_rewards) == ("step_timeout", [1.0])
    assert rollout.rewards == {"environment": 1.0, "final": 0.25}


@pytest.mark.parametrize("slow", ["policy", "environment"])
async def test_seconds_of_a_rollout(slow: str) -> None:
    class SlowLater(Scripted):
        async def generate(self, request: Any) -> Completion:
            self.seconds = 30 if self.requests and slow == "policy" else 0
            return await super().generate(request)

    episode = Counting(takes=30 if slow == "environment" else 0)
    rollout = await attempt(episode, SlowLater(["one"]), TurnLimits(rollout_seconds=0.2))
    assert (rollout.limit, rollout.step_rewards) == ("rollout_timeout", [1.0])


async def test_a_limit_before_the_first_turn_is_a_failure() -> None:
    with pytest.raises(EnvError, match=r"no turn of the policy within the 0.05 s of rollout_timeout"):
        await attempt(Counting(), Scripted(["one"], seconds=30), TurnLimits(rollout_seconds=0.05))
    with pytest.raises(EnvError, match=r"no first message within the 0.05 s of step_timeout"):
        await attempt(Counting(begins_in=30), Scripted(["one"]), TurnLimits(step_seconds=0.05))


async def test_a_request_that_cannot_be_served_fails_the_rollout() -> None:
    class Refuses(Scripted):
        async def generate(self, request: Any) -> Completion:
            return Completion.failed(request, "no room", 0)

    with pytest.raises(EngineError, match="no room"):
        await attempt(Counting(), Refuses([""]))


async def test_the_environments_own_timeouts_are_its_errors() -> None:
    class Broken(Counting):
        async def step(self, turn: AssistantTurn) -> Step:
            raise TimeoutError("the server")

    with pytest.raises(TimeoutError, match="the server"):
        await attempt(Broken(), Scripted(["one"]), TurnLimits(step_seconds=30))


async def test_the_end_of_a_turn_ends_the_completion() -> None:
    """Also with models whose own configuration does not say so."""
    policy = Scripted(["one"])
    await attempt(Counting(lasts=1), policy, stop_token_ids=(7,))
    assert policy.requests[0].sampling.stop_token_ids == (7, tokenizer_of(STYLE).eos_token_id)
