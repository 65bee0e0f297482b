"""Rollout sources of these tests, as another package would register them."""

from __future__ import annotations

import asyncio
from typing import Any, Self

from mrl.rollouts import ROLLOUT_SOURCES, PolicyClient, SourceSetup
from mrl.types import GenerateRequest, Group, Rollout, Sample, Task, derive_seed

TURNS = 3


@ROLLOUT_SOURCES.register("echo_game")
class EchoGame:
    """Three turns: what the policy says is answered with two tokens of the prompt. The reward, which the environment
    gives, is the share of sampled tokens that are even; a step's is that of its turn. Every prompt begins with exactly
    the tokens of the one before and its completion."""

    scores = True

    def __init__(self, setup: SourceSetup, think: float, fails_every: int) -> None:
        self.setup, self.think, self.fails_every = setup, think, fails_every
        self.started = 0

    @classmethod
    def create(cls, setup: SourceSetup, *, think: float = 0.0, fails_every: int = 0) -> Self:
        return cls(setup, think, fails_every)

    async def run(self, task: Task, attempt: int, policy: PolicyClient, seed: int) -> Rollout:
        self.started += 1
        if self.fails_every and self.started % self.fails_every == 0:
            raise ConnectionError("the environment broke off")
        prompt = self.setup.encoder.encode(task.prompt)
        answer = prompt[:2]
        name = f"{task.id}#{attempt}"
        ids: list[int] = []
        mask: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        steps: list[float] = []
        finish = "stop"
        for turn in range(TURNS):
            request = GenerateRequest(
                f"{name}/{turn}", (*prompt, *ids), self.setup.sampling, derive_seed(seed, turn), session=name
            )
            said = await policy.generate(request)
            if said.error is not None:
                raise RuntimeError(said.error)
            tokens = len(said.token_ids)
            ids += said.token_ids
            mask += [1] * tokens
            logprobs += said.logprobs
            version = said.policy_version
            versions += version if isinstance(version, list) else [version] * tokens
            steps.append(sum(token % 2 == 0 for token in said.token_ids) / max(1, tokens) / TURNS)
            finish = said.finish_reason
            if turn < TURNS - 1:
                ids += answer
                mask += [0] * len(answer)
                logprobs += [0.0] * len(answer)
                versions += [versions[-1]] * len(answer)
                await asyncio.sleep(self.think * (1 + hash_of(name, turn) % 3))
        sample = Sample(prompt, ids, logprobs, mask, versions, finish)  # type: ignore[arg-type]
        text = str(self.setup.tokenizer.decode(ids))
        return Rollout(name, task.id, attempt, [], [sample], task.prompt, text, reward=sum(steps), step_rewards=steps)


def hash_of(*parts: Any) -> int:
    return derive_seed(*parts)


@ROLLOUT_SOURCES.register("all_at_once")
class AllAtOnce:
    """Takes every prompt in one call, as TRL's `rollout_func` does."""

    def __init__(self, setup: SourceSetup) -> None:
        self.setup = setup

    @classmethod
    def create(cls, setup: SourceSetup) -> Self:
        return cls(setup)

    async def collect(self, tasks: list[Task], policy: PolicyClient, n: int, seed: int) -> list[Group]:
        groups = []
        for task in tasks:
            prompt = self.setup.encoder.encode(task.prompt)
            group = Group(task, [])
            for k in range(n):
                own = derive_seed(seed, task.id, k)
                said = await policy.generate(GenerateRequest(f"{task.id}#{k}", tuple(prompt), self.setup.sampling, own))
                count = len(said.token_ids)
                sample = Sample(prompt, said.token_ids, said.logprobs, [1] * count, said.policy_version)
                text = str(self.setup.tokenizer.decode(said.token_ids))
                group.rollouts.append(Rollout(said.request_id, task.id, k, [], [sample], task.prompt, text))
            groups.append(group)
        return groups
