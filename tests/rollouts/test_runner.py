"""Attempts of any source: grouped, limited, cancelled, and one that fails is data."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mrl.errors import SyncError, WorkerDied
from mrl.rollouts.runner import Runner, close_source
from mrl.types import Group, Rollout, Task, derive_seed

TASKS = [Task(f"t{i}", f"prompt {i}") for i in range(4)]


class Script:
    """A source that does what the test says, and remembers what it was asked."""

    def __init__(self, act: Any = None) -> None:
        self.act = act
        self.asked: list[tuple[str, int, int]] = []
        self.at_once = self.most = self.cancelled = 0

    async def run(self, task: Task, attempt: int, policy: Any, seed: int) -> Rollout:
        self.asked.append((task.id, attempt, seed))
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        try:
            await asyncio.sleep(0.001)
            if self.act is not None:
                await self.act(task, attempt)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.at_once -= 1
        return Rollout(f"{task.id}#{attempt}", task.id, attempt, [], [], reward=1.0)

    @classmethod
    def create(cls, setup: Any) -> Script:
        return cls()


def ids(groups: list[Group]) -> list[list[str]]:
    return [[rollout.id for rollout in group.rollouts] for group in groups]


async def test_groups_come_in_order_with_a_seed_for_each_attempt() -> None:
    source, ended = Script(), []

    async def act(task: Task, attempt: int) -> None:
        await asyncio.sleep(0.01 * (4 - int(task.id[1:])) + 0.001 * (3 - attempt))

    source.act = act
    groups = await Runner(source, None).run(TASKS, 3, seed=7, finished=lambda group: ended.append(group.task.id))
    assert ids(groups) == [[f"t{i}#{k}" for k in range(3)] for i in range(4)]
    assert ended == ["t3", "t2", "t1", "t0"], "each as soon as its last attempt has ended"
    assert source.asked == [(f"t{i}", k, derive_seed(7, f"t{i}", k)) for i in range(4) for k in range(3)]
    assert source.most == 12


async def test_without_tasks_no_source_is_asked() -> None:
    class AtOnce:
        async def collect(self, *_: Any) -> list[Group]:
            raise AssertionError

    assert await Runner(AtOnce(), None).run([], 2, seed=0) == []
    assert await Runner(Script(), None).run([], 2, seed=0) == []


async def test_a_task_that_comes_again_gets_other_attempts() -> None:
    groups = await Runner(Script(), None).run([TASKS[0], TASKS[1], TASKS[0]], 2, seed=0)
    assert ids(groups) == [["t0#0", "t0#1"], ["t1#0", "t1#1"], ["t0#2", "t0#3"]]


async def test_a_failed_attempt_is_a_failed_rollout_and_takes_no_other_with_it() -> None:
    async def act(task: Task, attempt: int) -> None:
        if (task.id, attempt) == ("t1", 0):
            raise ConnectionError("broke off")
        if (task.id, attempt) == ("t2", 1):
            await asyncio.sleep(60)
        if (task.id, attempt) == ("t3", 1):
            raise TimeoutError("its own")
        if (task.id, attempt) == ("t0", 0):
            helper = asyncio.ensure_future(asyncio.sleep(60))
            asyncio.get_running_loop().call_soon(helper.cancel)
            await helper

    groups = await Runner(Script(act), None, timeout=0.2).run(TASKS, 2, seed=0)
    failed = {r.id: r.error for group in groups for r in group.rollouts if r.status == "failed"}
    assert failed == {
        "t0#0": "CancelledError: what it waited for was cancelled, and not by the run",
        "t1#0": "ConnectionError: broke off",
        "t2#1": "took longer than 0.2 s (rollout_timeout)",
        "t3#1": "TimeoutError: its own",
    }
    assert all(len(group.rollouts) == 2 for group in groups)
    rollout = groups[1].rollouts[0]
    assert (rollout.reward, rollout.samples, rollout.prompt) == (None, [], "prompt 1")


@pytest.mark.parametrize("error", [WorkerDied("gone"), SyncError("other weights")])
async def test_what_no_attempt_can_help_ends_all(error: Exception) -> None:
    async def act(task: Task, attempt: int) -> None:
        if (task.id, attempt) == ("t1", 0):
            raise error
        await asyncio.sleep(60)

    source = Script(act)
    with pytest.raises(type(error)):
        await Runner(source, None).run(TASKS, 2, seed=0)
    assert source.cancelled == 7
    assert source.at_once == 0


async def test_given_up_all_attempts_have_ended() -> None:
    async def act(task: Task, attempt: int) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.02)  # hangs up

    source = Script(act)
    runner = Runner(source, None)
    work = asyncio.create_task(runner.run(TASKS, 2, seed=0))
    await asyncio.sleep(0.01)
    assert runner.in_flight == 8
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert (source.at_once, runner.in_flight, runner.ended) == (0, 0, 0)


async def test_so_many_at_a_time() -> None:
    source = Script()
    runner = Runner(source, None, at_once=3)
    groups = await runner.run(TASKS, 4, seed=0)
    assert source.most == 3
    assert ids(groups) == [[f"t{i}#{k}" for k in range(4)] for i in range(4)]
    assert runner.ended == 16


async def test_a_source_that_cannot_be_closed_hides_no_error() -> None:
    class Stuck:
        async def close(self) -> None:
            raise ConnectionError("gone already")

    assert await close_source(Stuck()) == ["Stuck could not be closed: ConnectionError: gone already"]
    assert await close_source(object()) == []
