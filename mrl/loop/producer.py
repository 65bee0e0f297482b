"""What a scheduler has done for a batch of tasks: attempts, rewards, and the reference model's logprobs beside them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from mrl.backends import WorkerHandle
from mrl.config import OrchestratorConfig
from mrl.experience.failures import check_failures, check_step_rewards
from mrl.experience.reference import add_reference_logprobs
from mrl.loop.collector import Collector
from mrl.loop.schedule import TaskBatch
from mrl.types import Group, Task, derive_seed
from mrl.workers.scoring import TrainerState


@dataclass
class Producer:
    """Attempts and scores the tasks of a batch."""

    config: OrchestratorConfig
    tasks: list[Task]
    collector: Collector
    actor: WorkerHandle
    total_steps: int

    async def produce(self, batch: TaskBatch, generated: Callable[[], None]) -> None:
        """Fill in the batch's groups. They stay in it, whatever fails after they were sampled. Raises MRLError."""
        again = ("again", batch.again) if batch.again else ()
        seed = derive_seed(self.config.training.seed, "rollout", batch.step, *again)
        state = TrainerState(global_step=batch.step, max_steps=self.total_steps, epoch=batch.epoch)

        def sampled(groups: list[Group]) -> None:
            batch.groups += groups
            generated()

        async def reference(groups: list[Group]) -> None:
            start = perf_counter()
            await add_reference_logprobs(groups, self.config, self.actor)
            batch.seconds["reference"] = perf_counter() - start

        # With `colocate` vLLM has the GPU now; the actor computes reference logprobs in its own turn.
        beside = not self.config.overlap.by_group and not self.config.serving.colocate
        asks_reference = self.config.algorithm.beta > 0 and beside
        done = await self.collector.collect(
            [self.tasks[index] for index in batch.indices],
            self.config.training.num_generations,
            seed=seed,
            state=state,
            generated=sampled,
            beside_scoring=reference if asks_reference else None,
            finished=batch.attempted.append,
        )
        batch.logged += done.logged
        batch.seconds |= done.seconds
        check_step_rewards(batch.groups, self.config)
        if self.config.algorithm.zero_variance_groups == "resample" and not self.config.overlap.by_group:
            check_failures(batch.groups, self.config, batch.step)  # more of what cannot be scored does not help
