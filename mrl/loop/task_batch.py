"""Tasks that are attempted together and their groups, also as plain data for a checkpoint."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import compress
from typing import Any, Literal

from mrl.store.rows import jsonable
from mrl.types import Group, Rollout, Sample, Task

_STORED = ("step", "number", "indices", "epoch", "again", "version", "ended")
"""Fields of every batch in a checkpoint."""

Stage = Literal["waiting", "generating", "generated", "done", "failed"]


@dataclass(eq=False)
class TaskBatch:
    """Tasks that are attempted together, and what came of it."""

    step: int
    """The step they were drawn for; seeds derive from it."""
    number: int
    """Its place among all batches."""
    indices: list[int]
    """Of the tasks."""
    epoch: float
    again: int = 0
    """Above 0: resampled, or drawn twice for the same step; part of its seed."""
    groups: list[Group] = field(default_factory=list)
    attempted: list[Group] = field(default_factory=list, repr=False)
    """Groups whose attempts have ended, in that order, for the progress display; `groups` has them when all have."""
    logged: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    """What reward functions logged, with the number of rollouts."""
    seconds: dict[str, float] = field(default_factory=dict)
    stage: Stage = "waiting"
    ended: int = 0
    """Its place in the order in which batches were done."""
    version: int = 0
    """The policy version when it was started."""
    work: asyncio.Task[None] | None = None
    _oldest: int | None = field(default=None, repr=False)

    def oldest(self) -> int:
        """The earliest policy version that sampled one of its tokens. For a batch that is done."""
        if self._oldest is None:  # asked again whenever any other batch is done
            earliest = (_earliest(sample.policy_version, self.version) for sample in _samples(self.groups))
            self._oldest = min(earliest, default=self.version)
        return self._oldest

    def state_dict(self) -> dict[str, Any]:
        """Plain data; with its groups if it is done, else it is restarted."""
        state = {name: getattr(self, name) for name in _STORED}
        if self.stage != "done":
            return state
        groups = [{"task": g.task.id, "rollouts": [jsonable(asdict(r)) for r in g.rollouts]} for g in self.groups]
        return state | {"logged": self.logged, "seconds": self.seconds, "groups": groups}

    @classmethod
    def from_state(cls, state: dict[str, Any], tasks: dict[str, Task]) -> TaskBatch:
        """What `state_dict` gave. tasks: by id."""
        plain = {name: value for name, value in state.items() if name not in ("groups", "logged")}
        batch = cls(**plain, logged=[(count, metrics) for count, metrics in state.get("logged", [])])
        if "groups" in state:
            batch.stage = "done"
            batch.groups = [Group(tasks[g["task"]], [_rollout(r) for r in g["rollouts"]]) for g in state["groups"]]
        return batch


def staleness(groups: list[Group], version: int) -> dict[str, float]:
    """Policy versions from the sampler of a token to the actor that trains on it: mean over sampled tokens, and
    maximum."""
    sampled: Counter[int] = Counter()
    for sample in _samples(groups):
        if isinstance(sample.policy_version, int):
            sampled[sample.policy_version] += sample.num_sampled
        else:
            sampled.update(compress(sample.policy_version, sample.mask))
    sampled = +sampled  # without those of no token
    if not sampled:
        return {}
    lags = sum((version - sampler) * count for sampler, count in sampled.items())
    return {
        "rollout/staleness_mean": lags / sampled.total(),
        "rollout/staleness_max": float(version - min(sampled)),
    }


def _samples(groups: list[Group]) -> Iterator[Sample]:
    return (sample for group in groups for rollout in group.rollouts for sample in rollout.samples)


def _earliest(versions: int | list[int], default: int) -> int:
    return versions if isinstance(versions, int) else min(versions, default=default)


def _rollout(stored: dict[str, Any]) -> Rollout:
    return Rollout(**(stored | {"samples": [Sample(**sample) for sample in stored["samples"]]}))
