"""The two ways in which a step gets its groups: the batch drawn for it, or whatever ends first."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any

from mrl.config.overlap import OverlapConfig
from mrl.data import TaskOrder
from mrl.loop.schedule import Scheduler
from mrl.loop.task_batch import TaskBatch
from mrl.store.read import DROPPED, UNUSED


def make_scheduler(
    order: TaskOrder,
    overlap: OverlapConfig,
    produce: Callable[[TaskBatch, Callable[[], None]], Awaitable[None]],
    **options: Any,
) -> Scheduler:
    """The scheduler of a run's mode. options: of Scheduler."""
    return (SingleTasks if overlap.by_group else WholeBatches)(order, overlap, produce, **options)


class WholeBatches(Scheduler):
    """A step trains on the batch that was drawn for it, and where groups without a signal are resampled, on further
    tasks beside it, round by round. Nothing is left to chance."""

    async def finish_in_flight(self) -> None:
        works = [batch.work for batch in self.batches if batch.work is not None]
        await asyncio.gather(*works, return_exceptions=True)

    def _parts(self, indices: list[int]) -> list[list[int]]:
        return [indices]

    def _accepts_stored(self, stored: dict[str, Any]) -> bool:
        return stored["again"] > 0 or len(stored["indices"]) == self.sizes.get(stored["step"])

    def _may_begin(self) -> list[TaskBatch]:
        return [batch for batch in self._waiting() if batch.step <= self._limit()]

    def _is_for(self, batch: TaskBatch, step: int) -> bool:
        return batch.step == step

    def _ready(self, step: int) -> list[TaskBatch]:
        return [batch for batch in self.batches if batch.stage == "done" and batch.step == step]

    def _enough(self, step: int, taken: list[TaskBatch]) -> bool:
        return bool(taken) and all(batch.step != step for batch in self.batches)

    def _missing(self, step: int, taken: list[TaskBatch]) -> int:
        rounds = len(taken) - 1
        return max(0, self.sizes[step] - self._with_signal(taken)) if rounds < self.max_resamples else 0

    def _raises(self, batch: TaskBatch, step: int) -> bool:
        """Only its own step raises it: what one before it has learned is not lost."""
        return batch.step == step

    def _seconds(self, taken: list[TaskBatch]) -> dict[str, float]:
        """The sum over the rounds, which ran one after the other."""
        return {name: sum(batch.seconds.get(name, 0.0) for batch in taken) for name in _kinds(taken)}


class SingleTasks(Scheduler):
    """A step takes the groups that end first. More tasks are started than it needs (`over_sampling`), and those that
    end too late are stopped and restarted, or with `queue` carried into the next step as long as they are not too
    old (`max_staleness`)."""

    @property
    def surplus(self) -> int:
        """Tasks of later steps that may begin early."""
        return math.ceil(self.order.batch_size * (self.overlap.over_sampling - 1))

    async def finish_in_flight(self) -> None:
        """Waits for nothing: runs are not reproducible in this mode."""

    def _parts(self, indices: list[int]) -> list[list[int]]:
        return [[index] for index in indices]

    def _accepts_stored(self, stored: dict[str, Any]) -> bool:
        return len(stored["indices"]) == 1

    def _may_begin(self) -> list[TaskBatch]:
        limit = self._limit()
        early = sum(batch.step > limit for batch in self.batches if batch.stage != "waiting")
        if self.surplus:
            self._draw_up_to(limit + 1)
        found = []
        for batch in self._waiting():
            if batch.step > limit:
                if early >= self.surplus:
                    continue  # a task resampled for an earlier step may come after it
                early += 1
            found.append(batch)
        return found

    def _is_for(self, batch: TaskBatch, step: int) -> bool:
        return True

    def _ready(self, step: int) -> list[TaskBatch]:
        """The oldest first, before they are too old."""
        done = (batch for batch in self.batches if batch.stage == "done")
        return sorted(done, key=lambda batch: (batch.version, batch.ended))

    def _enough(self, step: int, taken: list[TaskBatch]) -> bool:
        given_up = max(0, self._without_signal(taken) - self._replaceable(step))
        return self._with_signal(taken) >= self.sizes[step] - given_up

    def _missing(self, step: int, taken: list[TaskBatch]) -> int:
        useless = self._without_signal(taken)
        return int(bool(self._without_signal(taken[-1:])) and useless <= self._replaceable(step))

    def _without_signal(self, taken: list[TaskBatch]) -> int:
        return len(taken) - self._with_signal(taken)

    def _replaceable(self, step: int) -> int:
        return self.max_resamples * self.sizes[step]

    def _raises(self, batch: TaskBatch, step: int) -> bool:
        return True

    def _drop_stale(self, version: int) -> None:
        if self.overlap.stale_rollouts == "correct":
            return
        for batch in [b for b in self.batches if b.stage not in ("waiting", "failed")]:
            behind = version - (batch.oldest() if batch.stage == "done" else batch.version)
            if behind <= self.overlap.steps_ahead:
                continue
            if self.overlap.async_mode != "queue":
                self._restart_batch(batch)
                continue
            # Resampled rather than restarted: the same task would only take too long again.
            self.batches.remove(batch)
            if batch.work is not None:
                batch.work.cancel()
            self.counts["dropped"] += 1
            bound = f"max_staleness: {self.overlap.steps_ahead}"
            self._leave_out(batch, f"{DROPPED}sampled by weights {behind} versions old ({bound})")
            self._resample(batch.step, 1, [])

    def _after_taking(self) -> None:
        if self.overlap.async_mode == "off":  # nothing is generated while the actor trains
            self._stop_generating()

    def _stop_surplus(self) -> bool:
        ended = sum(batch.stage in ("generated", "done") for batch in self.batches)
        if not self.surplus or ended < self.sizes.get(self.trained + 2, 0):
            return False
        self._stop_generating()
        return True

    def _seconds(self, taken: list[TaskBatch]) -> dict[str, float]:
        """Those of the batch that took longest: they run side by side."""
        return {name: max(batch.seconds.get(name, 0.0) for batch in taken) for name in _kinds(taken)}

    def _stop_generating(self) -> None:
        for batch in [batch for batch in self.batches if batch.stage == "generating"]:
            self._restart_batch(batch)

    def _restart_batch(self, batch: TaskBatch) -> None:
        """Cancel a batch in flight, or set aside one that ended too late; its tasks wait to be attempted again."""
        if batch.work is not None:
            batch.work.cancel()
        again = TaskBatch(batch.step, batch.number, batch.indices, batch.epoch, batch.again)
        self.batches[self.batches.index(batch)] = again
        self.counts["unused" if batch.groups else "stopped"] += len(batch.indices)
        self._leave_out(batch, f"{UNUSED}it ended when its step had enough groups (over_sampling) and is restarted")

    def _leave_out(self, batch: TaskBatch, why: str) -> None:
        """Keep what was generated for the record; no step trains on it."""
        for rollout in (rollout for group in batch.groups for rollout in group.rollouts):
            rollout.fail(why)
        self.dropped += batch.groups


def _kinds(batches: list[TaskBatch]) -> list[str]:
    return list(dict.fromkeys(name for batch in batches for name in batch.seconds))
