"""From tasks to scored groups: attempts, rewards, and the reference model's logprobs beside them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

from mrl.backends import WorkerHandle
from mrl.config import OrchestratorConfig
from mrl.data import TaskOrder
from mrl.experience.batch import check_failures, check_steps, reference_samples, teaching_groups
from mrl.loop.dynamic_sampling import refill
from mrl.loop.schedule import Ticket
from mrl.rollouts.base import RolloutSource
from mrl.types import Group, Sample, Task, derive_seed
from mrl.workers.pool import PolicyClient
from mrl.workers.scoring import TrainerState, score_groups


@dataclass
class Producer:
    """Attempts a ticket's tasks and scores them. `order` is where further tasks come from (dynamic sampling)."""

    config: OrchestratorConfig
    tasks: list[Task]
    source: RolloutSource
    policy: PolicyClient
    rewards: WorkerHandle
    actor: WorkerHandle
    order: TaskOrder
    total_steps: int

    async def produce(self, ticket: Ticket, generated: Callable[[], None]) -> None:
        """Fill in the ticket. What was generated stays in it, whatever fails afterwards. Raises MRLError."""
        refills = self.config.algorithm.zero_variance_groups == "resample" and not self.config.overlap.by_group
        again = ("again", ticket.again) if ticket.again else ()
        first = await self._attempt(ticket, ticket.indices, derive_seed(self._seed, "rollout", ticket.step, *again))
        if not refills:
            generated()
        await self._score(ticket, first)
        if refills:
            await self._refill(ticket)
            generated()

    async def add_reference_logprobs(self, groups: list[Group]) -> None:
        """Where a KL term needs them and they are not known yet; all at once, since the last bits depend on that."""
        missing = [s for s in reference_samples(groups, self.config) if s.reference_logprobs is None]
        if missing:
            await self._add_reference_logprobs(missing)

    # --- inner ------------------------------------------------------------------------------------------------------

    @property
    def _seed(self) -> int:
        return self.config.training.seed

    async def _attempt(self, ticket: Ticket, indices: list[int], seed: int) -> list[Group]:
        tasks = [self.tasks[index] for index in indices]
        with _timed(ticket, "generate"):
            groups = await self.source.collect(tasks, self.policy, self.config.training.num_generations, seed=seed)
        ticket.groups += groups
        return groups

    async def _refill(self, ticket: Ticket) -> None:
        """Attempt further tasks until a batch of the ticket's groups teaches something."""
        drawn = set(ticket.indices)

        async def attempt(missing: int, number: int) -> None:
            # What cannot be scored is not helped by more of it.
            check_failures(ticket.groups, self.config, ticket.step)
            # The round is part of the seed: in a small dataset the same task may come again within a step.
            seed = derive_seed(self._seed, "rollout", ticket.step, number)
            indices = self.order.next_batch(missing, avoid=drawn)
            drawn.update(indices)
            await self._score(ticket, await self._attempt(ticket, indices, seed))

        ticket.resamples = await refill(
            lambda: len(teaching_groups(ticket.groups, self.config)),
            self.config.training.batch_size,
            self.config.algorithm.max_resamples,
            attempt,
        )

    async def _score(self, ticket: Ticket, groups: list[Group]) -> None:
        """Rewards; meanwhile the actor asks its reference model about the same samples, where it will need that."""
        beside = not self.config.overlap.by_group and not self.config.serving.colocate  # the actor has the device then
        samples = reference_samples(groups, self.config) if beside else []
        reference = asyncio.ensure_future(self._timed_reference(ticket, samples)) if samples else None
        state = TrainerState(global_step=ticket.step, max_steps=self.total_steps, epoch=ticket.epoch)
        try:
            with _timed(ticket, "reward"):
                logged = await score_groups(self.rewards, groups, state)
        except BaseException:
            if reference is not None:
                reference.cancel()
            raise
        if reference is not None:
            await reference
        check_steps(groups, self.config)
        ticket.logged.append((sum(len(group.rollouts) for group in groups), logged))

    async def _timed_reference(self, ticket: Ticket, samples: list[Sample]) -> None:
        with _timed(ticket, "reference"):
            await self._add_reference_logprobs(samples)

    async def _add_reference_logprobs(self, samples: list[Sample]) -> None:
        found = await self.actor.call("reference_logprobs", samples, self.config.generation.temperature)
        for sample, logprobs in zip(samples, found, strict=True):
            sample.reference_logprobs = logprobs


@contextmanager
def _timed(ticket: Ticket, name: str) -> Iterator[None]:
    start = perf_counter()
    try:
        yield
    finally:
        ticket.seconds[name] = ticket.seconds.get(name, 0.0) + perf_counter() - start
