"""Attempts of several turns: the policy and its environment in turn, within limits that are the same for all sources.

    begin ─▶ messages ─▶ policy ─▶ what it says ─▶ step ─▶ messages … until it is done, or a limit is reached

A limit ends the attempt, as truncated, and its reward is what the environment gives by then. What goes wrong raises,
and makes a failed rollout of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, field, replace
from math import fsum
from time import perf_counter
from typing import Any, Protocol, TypeVar

from mrl.errors import EngineError, EnvError
from mrl.rollouts.base import MessagePolicy, PolicyClient, Reply, SourceSetup, TurnLimits
from mrl.rollouts.chat import AssistantTurn, ChatFormat, ToolSpec
from mrl.rollouts.conversation import Conversation
from mrl.rollouts.runner import rollout_id
from mrl.types import Completion, GenerateRequest, Message, Prompt, Rollout, Sample, Task, derive_seed

T = TypeVar("T")


@dataclass
class Step:
    """An environment's answer to a turn of the policy."""

    messages: list[Message] = field(default_factory=list)
    """Which the policy sees next, unless it is done."""
    reward: float | None = None
    """For this turn; None = it says nothing, which counts as 0."""
    done: bool = False


class Episode(Protocol):
    """One attempt's environment."""

    tools: list[ToolSpec]
    """What the policy is told that it may call; known after `begin`."""
    counts: dict[str, float]
    """What it counted (`mrl.types.TURN_COUNTS`)."""

    async def begin(self) -> list[Message]:
        """The messages up to the policy's first turn."""
        ...

    async def step(self, turn: AssistantTurn) -> Step:
        """What comes of a turn. Never called again for the same one."""
        ...

    async def rewards(self) -> dict[str, float | None]:
        """Rewards at the end, by name, which are added to those of the steps; None = does not apply."""
        ...


async def play(
    episode: Episode,
    chat: ChatFormat,
    setup: SourceSetup,
    task: Task,
    attempt: int,
    policy: PolicyClient | MessagePolicy,
    seed: int,
) -> Rollout:
    """One attempt, from the first message to the reward. Parts of the reward are in `Rollout.rewards`. With a policy
    that is asked with messages there are no samples.

    Raises EnvError when a limit of time is reached before the policy has said anything, or while rewards are asked for;
    EngineError for a request that cannot be served; and what the environment raises.
    """
    if isinstance(policy, MessagePolicy):
        return await _MessageAttempt(episode, chat, setup, policy, task, attempt).play(seed)
    return await _Attempt(episode, chat, setup, policy, task, attempt).play(seed)


class _Attempt:
    """An attempt while it lasts."""

    def __init__(
        self, episode: Episode, chat: ChatFormat, setup: SourceSetup, policy: Any, task: Task, attempt: int
    ) -> None:
        self.episode, self.chat, self.policy = episode, chat, policy
        self.task, self.attempt, self.name = task, attempt, rollout_id(task, attempt)
        self.images = setup.encoder.images
        self.limits: TurnLimits = setup.limits
        stops = tuple(sorted({*setup.sampling.stop_token_ids, *chat.stop_token_ids}))
        self.sampling = replace(setup.sampling, stop_token_ids=stops)
        self.deadline: float | None = None
        if self.limits.rollout_seconds is not None:
            self.deadline = asyncio.get_running_loop().time() + self.limits.rollout_seconds
        self.limit = ""
        self.sampled = 0
        self.step_rewards: list[float] = []
        self.rewarded = False
        self.environment_seconds = 0.0

    async def play(self, seed: int) -> Rollout:
        """Turns, until it is done or a limit is reached."""
        first = await self._in_time(self.episode.begin(), self.limits.step_seconds, "step_timeout")
        if first is None:
            raise EnvError(f"no first message within the {self._allowed()}")
        talk = self._begin(first)
        said: list[Message] = []
        while not self.limit:
            turn = await self._turn(talk, derive_seed(seed, talk.turns))
            if turn is None:
                break
            said.append(turn.message)
            if self.limit:
                break
            step = await self._in_time(self.episode.step(turn), self.limits.step_seconds, "step_timeout")
            if step is None:
                break
            self.rewarded |= step.reward is not None
            self.step_rewards.append(step.reward or 0.0)
            said += step.messages
            if step.done:
                break
            if talk.turns == self.limits.turns:
                self.limit = "max_turns"
                break
            talk.add(*step.messages)
        if not talk.turns:
            raise EnvError(f"no turn of the policy within the {self._allowed()}")
        return await self._rollout(talk, first, said)

    # --- inner ------------------------------------------------------------------------------------------------------

    def _begin(self, first: list[Message]) -> Any:
        return Conversation(self.chat, first, self.episode.tools, self.images)

    async def _turn(self, talk: Any, seed: int) -> AssistantTurn | None:
        """The policy's next turn; None where there is no room or no time for it."""
        prompt = talk.next_prompt()
        room, limit = self._room(prompt)
        if room < 1 and talk.turns:
            self.limit = limit
            return None
        sampling = replace(self.sampling, max_tokens=max(room, 1))
        media = talk.next_media()
        request = GenerateRequest(f"{self.name}/{talk.turns}", prompt, sampling, seed, session=self.name, media=media)
        completion: Completion | None = await self._in_time(self.policy.generate(request), None, "")
        if completion is None:
            return None
        if completion.error is not None or not completion.token_ids:
            raise EngineError(completion.error or f"{request.id}: the completion has no tokens")
        self.sampled += len(completion.token_ids)
        if completion.finish_reason == "length":
            self.limit = limit
        turn: AssistantTurn = talk.add_completion(completion)
        return turn

    def _room(self, prompt: tuple[int, ...]) -> tuple[int, str]:
        """Tokens that the next completion may have, and the option that says so."""
        limits = self.limits
        bounds = [(self.policy.max_model_len - len(prompt), "max_model_len")]
        if limits.turn_tokens is not None:
            bounds.append((limits.turn_tokens, "max_tokens"))
        if limits.rollout_tokens is not None:
            bounds.append((limits.rollout_tokens - self.sampled, "max_rollout_tokens"))
        return min(bounds)

    async def _in_time(self, work: Awaitable[T], seconds: float | None, limit: str) -> T | None:
        """What comes of it, or None with `limit` set when it takes longer than `seconds`, or than the attempt may."""
        now = asyncio.get_running_loop().time()
        ends = [(now + seconds, limit)] if seconds is not None else []
        ends += [(self.deadline, "rollout_timeout")] if self.deadline is not None else []
        when, reached = min(ends, default=(None, ""))
        start = perf_counter()
        timeout = asyncio.timeout_at(when)
        try:
            async with timeout:
                return await work
        except TimeoutError:
            if not timeout.expired():
                raise  # the environment's own
            self.limit = reached
            return None
        finally:
            if limit:
                self.environment_seconds += perf_counter() - start

    async def _rollout(self, talk: Any, first: list[Message], said: list[Message]) -> Rollout:
        samples: list[Sample] = talk.samples
        if self.limit and samples:
            samples[-1].finish_reason = "length"
        limit, self.limit, self.deadline = self.limit, "", None
        given = await self._in_time(self.episode.rewards(), self.limits.step_seconds, "step_timeout")
        if given is None:
            raise EnvError(f"no reward within the {self.limits.step_seconds:g} s of step_timeout")
        if self.rewarded:
            given = {"environment": fsum(self.step_rewards), **given}
        prompt, completion = _as_asked(self.task.prompt, first, said)
        counts = {"turns": float(talk.turns), "turns_extended": float(talk.extended)} | self.episode.counts
        return Rollout(
            self.name,
            self.task.id,
            self.attempt,
            messages=[*first, *said],
            samples=samples,
            prompt=prompt,
            completion=completion,
            rewards=given,
            step_rewards=self.step_rewards if self.rewarded else [],
            metrics=counts,
            seconds={"environment": self.environment_seconds},
            limit=limit,
            extra=self._further(),
        )

    def _further(self) -> dict[str, Any]:
        return {}

    def _allowed(self) -> str:
        seconds = self.limits.step_seconds if self.limit == "step_timeout" else self.limits.rollout_seconds
        return f"{seconds:g} s of {self.limit}"


class _MessageAttempt(_Attempt):
    """The same where the policy is asked with messages."""

    def _begin(self, first: list[Message]) -> _Messages:
        self.talk = _Messages(list(first))
        return self.talk

    async def _turn(self, talk: _Messages, seed: int) -> AssistantTurn | None:
        limits = self.limits
        bounds = [(self.sampling.max_tokens, "max_tokens")]
        if limits.turn_tokens is not None:
            bounds.append((limits.turn_tokens, "max_tokens"))
        if limits.rollout_tokens is not None:
            bounds.append((limits.rollout_tokens - self.sampled, "max_rollout_tokens"))
        room, limit = min(bounds)
        if room < 1 and talk.turns:
            self.limit = limit
            return None
        sampling = replace(self.sampling, max_tokens=max(room, 1))
        asked = self.policy.reply(talk.messages, self.episode.tools, sampling, seed)
        reply: Reply | None = await self._in_time(asked, None, "")
        if reply is None:
            return None
        self.sampled += reply.completion_tokens
        if reply.finish_reason == "length":
            self.limit = limit
        return talk.add_reply(reply)

    def _further(self) -> dict[str, Any]:
        replies = self.talk.replies
        return {
            "usage": {
                "prompt_tokens": sum(reply.prompt_tokens for reply in replies),
                "completion_tokens": sum(reply.completion_tokens for reply in replies),
            },
            "finish_reason": replies[-1].finish_reason if replies else None,
        }


@dataclass
class _Messages:
    """A conversation whose tokens nobody sees."""

    messages: list[Message]
    replies: list[Reply] = field(default_factory=list)
    extended: int = 0
    samples: list[Sample] = field(default_factory=list)

    @property
    def turns(self) -> int:
        return len(self.replies)

    def add(self, *messages: Message) -> None:
        self.messages += messages

    def add_reply(self, reply: Reply) -> AssistantTurn:
        self.replies.append(reply)
        self.messages.append(reply.turn.message)
        return reply.turn


def _as_asked(prompt: Prompt, first: list[Message], said: list[Message]) -> tuple[Prompt, str | list[Message]]:
    """Prompt and completion as reward functions get them: text for a text, messages for messages."""
    if isinstance(prompt, str):
        last = next((m for m in reversed(said) if m["role"] == "assistant"), {"content": ""})
        asked = first[-1]["content"]
        return (asked if isinstance(asked, str) else prompt), str(last["content"])
    return first, said
