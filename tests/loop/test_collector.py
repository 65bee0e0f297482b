"""From tasks to scored groups."""

from __future__ import annotations

from typing import Any

import pytest

from mrl.loop.collector import Collector
from mrl.rollouts.runner import Runner
from mrl.types import Group, Rollout, Task
from mrl.workers.scoring import TrainerState


class Source:
    async def run(self, task: Task, attempt: int, policy: Any, seed: int) -> Rollout:
        return Rollout(f"{task.id}#{attempt}", task.id, attempt, [], [], reward=1.0)

    @classmethod
    def create(cls, setup: Any) -> Source:
        return cls()


@pytest.mark.parametrize("independent", [True, False])
@pytest.mark.parametrize("count", [0, 1, 3])
async def test_groups_of_any_number_of_tasks(count: int, independent: bool) -> None:
    told: list[list[Group]] = []
    tasks = [Task(f"t{i}", "prompt") for i in range(count)]
    collector = Collector(Runner(Source(), None), None, independent)  # type: ignore[arg-type]  # all come scored
    done = await collector.collect(tasks, 2, seed=0, state=TrainerState(1, 1, 0.0), generated=told.append)
    assert [group.task for group in done.groups] == tasks
    assert told == [done.groups]
    # Rewards that look at all rollouts together log once.
    assert [rollouts for rollouts, _ in done.logged] == ([2] * count if independent else [2 * count] * bool(count))
    assert set(done.seconds) == {"generate", "reward"}
