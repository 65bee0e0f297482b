"""The order in which tasks are taken: seeded, resumable, nothing skipped and nothing repeated within an epoch."""

from __future__ import annotations

import random

from mrl.errors import DataError
from mrl.types import derive_seed


class TaskOrder:
    """Hands out indices of tasks, batch by batch, each epoch in another seeded order.

    num_tasks: size of the dataset. batch_size: tasks per step; the last batch of an epoch may be shorter, so that every
    task is taken exactly once per epoch. Epoch e is a function of (seed, e) alone, which is why two integers resume it.
    Raises DataError for an empty dataset, ValueError for a batch size below 1.
    """

    def __init__(self, num_tasks: int, batch_size: int, seed: int, shuffle: bool = True) -> None:
        if num_tasks < 1:
            raise DataError("there are no tasks to train on: the dataset is empty")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.num_tasks = num_tasks
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self._start(epoch=0, position=0)

    @property
    def epoch(self) -> int:
        """The epoch the next batch belongs to, counting from 0."""
        return self._epoch

    @property
    def position(self) -> int:
        """Tasks of this epoch already handed out, in [0, num_tasks)."""
        return self._position

    @property
    def steps_per_epoch(self) -> int:
        """Batches in one epoch, the shorter last one included."""
        return -(-self.num_tasks // self.batch_size)

    def next_batch(self, count: int | None = None) -> list[int]:
        """Indices of the next tasks: `count` of them (None: `batch_size`), or what is left of the epoch."""
        batch = self._indices[self._position : self._position + (self.batch_size if count is None else count)]
        self._position += len(batch)
        if self._position == self.num_tasks:
            self._start(epoch=self._epoch + 1, position=0)
        return batch

    def state_dict(self) -> dict[str, int]:
        """Where it stands, as plain integers."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "num_tasks": self.num_tasks,
            "seed": self.seed,
            "shuffle": int(self.shuffle),
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from `state`. The batch size may differ; what determines the order may not (DataError)."""
        mine = self.state_dict()
        for name in ("num_tasks", "seed", "shuffle"):
            if state[name] != mine[name]:
                raise DataError(
                    f"cannot resume: {name} was {state[name]} and is now {mine[name]}, so tasks would be skipped or "
                    f"repeated. Resume with the same dataset, seed and shuffle, or start a new run"
                )
        if state["epoch"] < 0 or not 0 <= state["position"] < self.num_tasks:
            raise DataError(
                f"cannot resume: epoch {state['epoch']}, position {state['position']} lies outside the dataset"
            )
        self._start(epoch=state["epoch"], position=state["position"])

    def _start(self, epoch: int, position: int) -> None:
        self._epoch, self._position = epoch, position
        self._indices = list(range(self.num_tasks))
        if self.shuffle:
            random.Random(derive_seed(self.seed, "epoch", epoch)).shuffle(self._indices)
