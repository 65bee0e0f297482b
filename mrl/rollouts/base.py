"""What a rollout source is: tasks in, groups of unscored rollouts out."""

from __future__ import annotations

from typing import Protocol

from mrl.types import Group, Task
from mrl.workers.pool import PolicyClient


class RolloutSource(Protocol):
    """Implemented by one file per kind of experience in this package."""

    async def collect(self, tasks: list[Task], policy: PolicyClient, n: int, *, seed: int) -> list[Group]:
        """Attempt every task `n` times. Attempt k of a task derives from (seed, task id, k) alone.

        A rollout that fails is returned with `status="failed"` and its error.
        """
        ...
