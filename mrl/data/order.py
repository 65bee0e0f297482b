"""The order in which tasks are taken: seeded, resumable, nothing skipped and nothing repeated within an epoch."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

from mrl.errors import DataError
from mrl.types import derive_seed


class TaskOrder:
    """Hands out indices of tasks, batch by batch, each epoch in another seeded order.

    num_tasks: size of the dataset. batch_size: tasks per step. Every task is taken exactly once per epoch, and every
    batch is whole: where an epoch ends within it, it goes on with the next one's order. A task of the next epoch that
    the batch already has is put off to the batch after it; only a dataset smaller than a batch repeats tasks within
    one. Epoch e's order is a function of (seed, e) alone, so two integers and what is put off resume it.
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
        self._start(epoch=0)

    @property
    def epoch(self) -> int:
        """The epoch the next batch belongs to, counting from 0."""
        return self._epoch

    @property
    def position(self) -> int:
        """Tasks of this epoch already handed out, in [0, num_tasks)."""
        return self._position

    def next_batch(self, count: int | None = None, avoid: Iterable[int] = ()) -> list[int]:
        """Indices of the next `count` tasks (None: `batch_size`). avoid: tasks that the step has, put off likewise."""
        batch: list[int] = []
        seen = set(avoid)
        for _ in range(self.batch_size if count is None else count):
            if len(seen) >= self.num_tasks:
                seen.clear()  # every task again
            batch.append(self._next(seen))
            seen.add(batch[-1])
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Where it stands, as plain data."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "put_off": list(self._put_off),
            "num_tasks": self.num_tasks,
            "seed": self.seed,
            "shuffle": int(self.shuffle),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`. The batch size may differ; what determines the order may not (DataError)."""
        mine = self.state_dict()
        for name in ("num_tasks", "seed", "shuffle"):
            if state[name] != mine[name]:
                raise DataError(
                    f"cannot resume: {name} was {state[name]} and is now {mine[name]}, so tasks would be skipped or "
                    f"repeated. Resume with the same dataset, seed and shuffle, or start a new run"
                )
        put_off = list(state.get("put_off", []))  # older checkpoints have none
        if state["epoch"] < 0 or not 0 <= state["position"] < self.num_tasks:
            raise DataError(
                f"cannot resume: epoch {state['epoch']}, position {state['position']} lies outside the dataset"
            )
        self._start(state["epoch"], state["position"], put_off)

    def _next(self, seen: set[int]) -> int:
        """The first task left of this epoch that is not among `seen`; those before it are put off. If all are among
        them: the first one."""
        index = next((index for index in self._put_off if index not in seen), None)
        if index is None:
            start = self._position + len(self._put_off)
            place = next((p for p in range(start, self.num_tasks) if self._indices[p] not in seen), None)
            if place is not None:
                self._put_off += self._indices[start:place]
                index = self._indices[place]
            else:
                index = self._put_off[0] if self._put_off else self._indices[start]
        if index in self._put_off:
            self._put_off.remove(index)
        self._position += 1
        if self._position == self.num_tasks:
            self._start(self._epoch + 1)
        return index

    def _start(self, epoch: int, position: int = 0, put_off: list[int] | None = None) -> None:
        self._epoch, self._position = epoch, position
        self._indices = list(range(self.num_tasks))
        if self.shuffle:
            random.Random(derive_seed(self.seed, "epoch", epoch)).shuffle(self._indices)
        put_off = put_off or []
        passed = self._indices[: position + len(put_off)]
        # Those of an epoch in another order (a seed that was allowed to change) have their place in this one.
        self._put_off = put_off if set(put_off) <= set(passed) else []
        """Tasks of this epoch that were passed over; they come first."""
