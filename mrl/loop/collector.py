"""Tasks attempted and scored: the one way from tasks to scored groups, for training, held-out tasks and `mrl eval`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from mrl.backends import BACKENDS
from mrl.config import OrchestratorConfig
from mrl.loop.preflight import Prepared
from mrl.rollouts import PolicyClient
from mrl.rollouts.runner import Runner
from mrl.types import Group, Rollout, Task
from mrl.workers.reward_pool import RewardPool
from mrl.workers.scoring import TrainerState, score_groups

Logged = list[tuple[int, dict[str, float]]]
"""What reward functions logged, part by part, each with its number of rollouts."""


@dataclass
class Collected:
    """Scored groups, in the order of their tasks, and how long they took."""

    groups: list[Group]
    logged: Logged = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    """`generate` until the last attempt has ended; `reward` from then until the last score."""


@dataclass
class Collector:
    """Attempts tasks with a run's source and scores the rollouts.

    early: a group is scored as soon as it has ended, while others are still being sampled, which only rewards that look
    at each rollout by itself can do; else they get all rollouts in one call.
    """

    runner: Runner
    rewards: RewardPool
    early: bool
    environment_of: Callable[[Rollout], Any] | None = None
    """Where reward functions may look at environments; a source's, which keeps them until they were `scored`."""
    scored: Callable[[Rollout], None] = lambda rollout: None

    @classmethod
    def of(
        cls, config: OrchestratorConfig, prepared: Prepared, policy: PolicyClient, rewards: RewardPool, n: int
    ) -> Collector:
        """As a run's options say. n: most attempts at a task."""
        options = config.rollout
        timeout, at_once = options.rollout_timeout, options.max_concurrent_rollouts
        runner = Runner(prepared.source, policy, timeout=timeout, at_once=at_once)
        collector = cls(runner, rewards, prepared.early_scoring)
        keep = getattr(prepared.source, "keep_environments", None)
        if keep is not None and BACKENDS.get(config.runtime.backend).shares_memory:
            # As many environments as attempts at a time: each group is scored when it has ended, and lets go of its
            # own. Not where groups are given up before they were scored.
            limited = at_once is not None and at_once >= n and not config.overlap.by_group
            collector.early |= limited
            collector.environment_of, collector.scored = keep(at_once if limited else None)
        return collector

    async def collect(
        self,
        tasks: list[Task],
        n: int,
        *,
        seed: int,
        state: TrainerState,
        generated: Callable[[list[Group]], None] = lambda groups: None,
        beside_scoring: Callable[[list[Group]], Awaitable[None]] | None = None,
        finished: Callable[[Group], None] = lambda group: None,
    ) -> Collected:
        """Attempt every task `n` times and score what comes of it.

        state: for reward functions. generated: called when nothing is being sampled any more. beside_scoring: awaited
        from then on, beside what is left to score. finished: called with each group whose attempts have ended. Without
        tasks nobody is asked for anything.

        Raises RewardError when a reward breaks its contract, and what `Runner.run` raises.
        """
        start = perf_counter()
        scored: dict[int, tuple[int, dict[str, float]]] = {}
        """By the first group's `id`."""
        beside: list[asyncio.Future[None]] = []

        async def score(groups: list[Group]) -> None:
            try:
                metrics = await score_groups(self.rewards, groups, state, self.environment_of)
            finally:
                for rollout in (rollout for group in groups for rollout in group.rollouts):
                    self.scored(rollout)
            scored[id(groups[0])] = sum(len(group.rollouts) for group in groups), metrics

        def ended(group: Group) -> None:
            finished(group)
            if self.early:
                beside.append(asyncio.ensure_future(score([group])))

        try:
            groups = await self.runner.run(tasks, n, seed=seed, state=state, finished=ended)
            generated(groups)
            sampled = perf_counter()
            if groups and not self.early:
                beside.append(asyncio.ensure_future(score(groups)))
            if beside_scoring is not None:
                beside.append(asyncio.ensure_future(beside_scoring(groups)))
            await asyncio.gather(*beside)
        finally:
            for work in beside:
                work.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
        # In the order of the tasks: which group ended first is left to time, and sums of floats depend on their order.
        logged = [scored[id(group)] for group in groups if id(group) in scored]
        return Collected(groups, logged, {"generate": sampled - start, "reward": perf_counter() - sampled})
