"""Scheduling of rollouts: which tasks are started when, and which groups a step trains on.

Tasks are drawn in batches, one for each step, and attempted ahead of training: those of step n may begin as soon as
step n - 1 - `steps_ahead` was trained, so that `steps_ahead` = 0 is the synchronous loop and nothing else differs
between the modes. Groups are handed out in two ways (mrl/loop/schedule_modes.py). `WholeBatches`: a step gets the batch
that was drawn for it. `SingleTasks`: a step takes the groups that end first, whichever step their tasks were drawn for.

The states of a TaskBatch, which is a step's whole batch or one of its tasks:

               begin            sampled            scored          take
    waiting ─────────▶ generating ─────▶ generated ─────▶ done ─────────▶ its step trains on it
       ▲                   │                 │             │
       └───────────────────┴─────────────────┴─────────────┤ not needed by its step, or too old: restarted
                                                           └ too old, with `queue`: dropped and resampled
    generating or generated ─▶ failed: the error is raised when its step comes

Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): where groups without a signal are resampled, further tasks are
drawn in their place once they are scored. What is drawn depends on rewards alone, which depend on the seed alone, and
every draw moves the data cursor that checkpoints hold.

All nondeterminism of timing is here: with whole batches there is none, and a run is reproducible.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from mrl.config.overlap import OverlapConfig
from mrl.data import TaskOrder
from mrl.errors import ConfigError, TrainingError
from mrl.loop.task_batch import TaskBatch
from mrl.system.gather import is_being_cancelled
from mrl.types import Group, Task


@dataclass
class Taken:
    """What a step gets."""

    batches: list[TaskBatch]
    seconds: dict[str, float]
    """What they took, by kind of work."""
    dropped: list[Group]
    """Since the last step: groups that were generated and that no step trains on; their rollouts say why."""
    counts: dict[str, int]
    """Since the last step: groups that were `dropped` for their age, that were generated and `unused` because the step
    had enough, and that were `stopped` before that. The latter two are restarted."""
    resamples: int
    """Rounds in which groups without a signal were resampled."""

    @property
    def groups(self) -> list[Group]:
        return [group for batch in self.batches for group in batch.groups]

    @property
    def logged(self) -> list[tuple[int, dict[str, float]]]:
        return [part for batch in self.batches for part in batch.logged]


class Scheduler(ABC):
    """Begins batches ahead of time and hands out the groups of each step.

    produce: attempts a batch's tasks and scores them; calls `generated` when nothing is being sampled for it any more.
    has_signal: whether a group counts for a step; those that do not are resampled, in at most `max_resamples` rounds a
    step.
    """

    def __init__(
        self,
        order: TaskOrder,
        overlap: OverlapConfig,
        produce: Callable[[TaskBatch, Callable[[], None]], Awaitable[None]],
        *,
        total_steps: int,
        step: int = 0,
        has_signal: Callable[[Group], bool] = lambda group: True,
        max_resamples: int = 0,
    ) -> None:
        self.order, self.overlap, self.produce = order, overlap, produce
        self.total_steps, self.has_signal, self.max_resamples = total_steps, has_signal, max_resamples
        self.drawn = self.trained = step
        self.numbers = 0
        self.sizes: dict[int, int] = {}
        """Tasks drawn for each step to come."""
        self.batches: list[TaskBatch] = []
        """Drawn and not handed out yet, in order."""
        self.taking: list[TaskBatch] = []
        """What the waiting step has so far."""
        self.dropped: list[Group] = []
        self.counts = _no_counts()
        self.extra_draws = 0
        """Draws beyond the first of a step; the seeds of resampled tasks derive from it."""
        self.endings = 0
        self.changed = asyncio.Event()

    # --- what the loop calls ----------------------------------------------------------------------------------------

    def advance(self, trained: int, version: int) -> None:
        """Step `trained` is done and the samplers serve `version`: start what may start now."""
        self.trained = trained
        self._drop_stale(version)
        self._draw_up_to(self._limit())
        for batch in self._may_begin():
            batch.version, batch.stage = version, "generating"
            batch.work = asyncio.create_task(self._work(batch))

    async def take(self, step: int, version: int) -> Taken:
        """The groups of a step that an actor of this version is about to train on, in the order they were drawn.

        Raises what `produce` raised. Cancelled, it takes nothing.
        """
        taken = self.taking = []
        try:
            resamples = await self._take(step, version, taken)
        except asyncio.CancelledError:
            self.batches = sorted([*self.batches, *taken], key=lambda batch: batch.number)
            raise
        self.sizes.pop(step, None)
        self._after_taking()
        taken.sort(key=lambda batch: batch.number)
        result = Taken(taken, self._seconds(taken), self.dropped, self.counts, resamples)
        self.dropped, self.counts = [], _no_counts()
        return result

    async def drain(self) -> None:
        """Return when nothing is being sampled, so that the weights can change between completions. Never raises: what
        has failed is raised when its step comes."""
        while self.generating() and not self._stop_surplus():
            await self._next_change()

    @abstractmethod
    async def finish_in_flight(self) -> None:
        """Wait for what is in flight, where a checkpoint has to hold it so that a resumed run is the same run.

        What fails is raised when its step comes."""

    def generating(self) -> bool:
        """Whether anything is being sampled, rather than scored."""
        return any(batch.stage == "generating" for batch in self.batches)

    def attempted(self, step: int) -> list[Group]:
        """Groups whose attempts have ended, of those that the step waiting for its groups may train on."""
        batches = [*self.taking, *(batch for batch in self.batches if self._is_for(batch, step))]
        return [group for batch in batches for group in batch.groups or batch.attempted]

    def in_flight(self) -> int:
        """Groups that were started and that no step has taken."""
        return sum(len(batch.indices) for batch in self.batches if batch.stage != "waiting")

    def unused(self) -> list[Group]:
        """What was generated and not handed out."""
        return [group for batch in self.batches for group in batch.groups] + self.dropped

    async def close(self) -> None:
        """Cancel what is in flight."""
        works = [batch.work for batch in self.batches if batch.work is not None]
        for work in works:
            work.cancel()
        await asyncio.gather(*works, return_exceptions=True)

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain data: every batch that was drawn, with its groups where it is done. Others are restarted."""
        return {
            "drawn": self.drawn,
            "numbers": self.numbers,
            "draws_again": self.extra_draws,
            "sizes": {str(step): size for step, size in self.sizes.items()},
            "batches": [batch.state_dict() for batch in self.batches],
        }

    def load_state_dict(self, state: dict[str, Any], tasks: list[Task]) -> None:
        """Go on from `state_dict`. tasks: those that indices refer to. Raises ConfigError when options or tasks changed
        so that what is in flight cannot be continued."""
        self.drawn, self.numbers, self.extra_draws = state["drawn"], state["numbers"], state["draws_again"]
        self.sizes = {int(step): size for step, size in state["sizes"].items()}
        by_id = {task.id: task for task in tasks}
        for stored in state["batches"]:
            self._check_stored(stored, len(tasks), by_id)
            self.batches.append(TaskBatch.from_state(stored, by_id))
        self.endings = max((batch.ended for batch in self.batches), default=0)

    # --- what the modes differ in -------------------------------------------------------------------------------------

    @abstractmethod
    def _parts(self, indices: list[int]) -> list[list[int]]:
        """A step's tasks as they are attempted: together, or each by itself."""

    @abstractmethod
    def _accepts_stored(self, stored: dict[str, Any]) -> bool:
        """Whether a stored batch was started in this mode."""

    @abstractmethod
    def _may_begin(self) -> list[TaskBatch]:
        """Waiting batches whose time has come."""

    @abstractmethod
    def _is_for(self, batch: TaskBatch, step: int) -> bool:
        """Whether a step may take it, once it is done."""

    @abstractmethod
    def _ready(self, step: int) -> list[TaskBatch]:
        """What a step may take, in the order in which it takes it."""

    @abstractmethod
    def _enough(self, step: int, taken: list[TaskBatch]) -> bool:
        """Whether the step has what it needs."""

    @abstractmethod
    def _missing(self, step: int, taken: list[TaskBatch]) -> int:
        """Tasks to resample for groups without a signal, now that the last of `taken` is known."""

    @abstractmethod
    def _raises(self, batch: TaskBatch, step: int) -> bool:
        """Whether an error in this batch is raised at this step."""

    def _drop_stale(self, version: int) -> None:  # noqa: B027 - most modes have nothing to do
        """Drop what is too stale for the next step, and so for every later one."""

    def _after_taking(self) -> None:  # noqa: B027
        """A step has its groups."""

    def _stop_surplus(self) -> bool:
        """Stop what is still being sampled if the next step does not need it. Returns whether it did."""
        return False

    @abstractmethod
    def _seconds(self, taken: list[TaskBatch]) -> dict[str, float]:
        """How long they took together, by kind of work."""

    # --- inner ------------------------------------------------------------------------------------------------------

    async def _take(self, step: int, version: int, taken: list[TaskBatch]) -> int:
        resamples = 0
        while True:
            self._raise_errors(step)
            self._drop_stale(version)
            for batch in self._ready(step):
                if self._enough(step, taken):
                    break
                self.batches.remove(batch)
                taken.append(batch)
                if missing := self._missing(step, taken):
                    self._resample(step, missing, taken)
                    resamples += 1
            if self._enough(step, taken):
                return resamples
            self.advance(self.trained, version)
            assert any(batch.stage != "waiting" for batch in self.batches), "a step waits for what nobody attempts"
            await self._next_change()

    async def _next_change(self) -> None:
        self.changed.clear()
        await self.changed.wait()

    async def _work(self, batch: TaskBatch) -> None:
        def generated() -> None:
            batch.stage = "generated"
            self.changed.set()

        try:
            await self.produce(batch, generated)
            self.endings += 1
            batch.stage, batch.ended = "done", self.endings
        except Exception:
            batch.stage = "failed"  # nobody waits for it any more; its step raises the error
            raise
        except asyncio.CancelledError:
            if is_being_cancelled():
                raise
            batch.stage = "failed"  # its step would wait for it for ever
            raise TrainingError(
                f"the tasks of step {batch.step} were not attempted to the end: something that they waited for was "
                "cancelled, and not by the run; look for asyncio's cancel() in the rollout source"
            ) from None
        finally:
            self.changed.set()

    def _raise_errors(self, step: int) -> None:
        for batch in self.batches:
            done = batch.work is not None and batch.work.done() and not batch.work.cancelled()
            if done and self._raises(batch, step):
                assert batch.work is not None
                error = batch.work.exception()
                if error is not None:
                    raise error

    def _limit(self) -> int:
        """The last step whose tasks may begin."""
        return min(self.trained + 1 + self.overlap.steps_ahead, self.total_steps)

    def _waiting(self) -> list[TaskBatch]:
        return [batch for batch in self.batches if batch.stage == "waiting"]

    def _with_signal(self, batches: list[TaskBatch]) -> int:
        return sum(self.has_signal(group) for batch in batches for group in batch.groups)

    def _draw_up_to(self, step: int) -> None:
        while self.drawn < min(step, self.total_steps):
            self.drawn += 1
            epoch = self._epoch()
            indices = self.order.next_batch()
            self.sizes[self.drawn] = len(indices)
            seen: set[int] = set()
            for part in self._parts(indices):
                # In a dataset smaller than a batch a task comes twice: a batch of its own, with a seed of its own.
                repeated = not seen.isdisjoint(part)
                self.extra_draws += repeated
                self._add(TaskBatch(self.drawn, 0, part, epoch, again=self.extra_draws if repeated else 0))
                seen.update(part)

    def _resample(self, step: int, count: int, taken: list[TaskBatch]) -> None:
        """Draw further tasks for a step."""
        self.extra_draws += 1
        epoch = self._epoch()
        has = {index for batch in [*self.batches, *taken] if batch.step == step for index in batch.indices}
        self._add(TaskBatch(step, 0, self.order.next_batch(count, avoid=has), epoch, again=self.extra_draws))

    def _epoch(self) -> float:
        return self.order.epoch + self.order.position / self.order.num_tasks

    def _add(self, batch: TaskBatch) -> None:
        self.numbers += 1
        batch.number = self.numbers
        self.batches.append(batch)

    def _check_stored(self, stored: dict[str, Any], tasks: int, known: dict[str, Task]) -> None:
        if not self._accepts_stored(stored):
            raise ConfigError(
                "cannot resume: the checkpoint holds groups in flight, which with these options (async_mode, "
                "max_staleness, over_sampling) would be scheduled in another way; resume with the options as they were"
            )
        if max(stored["indices"]) >= tasks or any(group["task"] not in known for group in stored.get("groups", [])):
            raise ConfigError(
                "cannot resume: the checkpoint holds groups in flight of tasks that the dataset no longer has; restore "
                "it, or start a new run"
            )


def _no_counts() -> dict[str, int]:
    return {"dropped": 0, "unused": 0, "stopped": 0}
