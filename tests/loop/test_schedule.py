"""Which tasks are begun when, and which groups a step gets: with attempts that last as long as the test says."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from mrl.config import OverlapConfig
from mrl.data import TaskOrder
from mrl.errors import ConfigError, RewardError, TrainingError
from mrl.loop.schedule import Taken
from mrl.loop.schedule_modes import make_scheduler
from mrl.loop.task_batch import TaskBatch, staleness
from mrl.types import Group, Rollout, Sample, Task

ORDER = [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 0, 1], [2, 3, 4], [5, 6, 7]]
"""Of ten tasks, three by three."""
TASKS = [Task(f"t{i}", f"prompt {i}") for i in range(10)]


class World:
    """Attempts end when `lasts` of the batch's tasks have ticked; the policy's version is what the test sets."""

    def __init__(self, overlap: OverlapConfig, *, batch: int = 3, steps: int = 6, **options: Any) -> None:
        self.version = 0
        self.begun: list[tuple[int, int]] = []
        """(task, policy version) of every attempt."""
        self.lasts: Callable[[int], float] = lambda index: 0.001
        self.has_signal: Callable[[int], bool] = lambda index: True
        self.order = TaskOrder(len(TASKS), batch, seed=0, shuffle=False)
        self.scheduler = make_scheduler(
            self.order, overlap, self.produce, total_steps=steps,
            has_signal=lambda group: self.has_signal(int(group.task.id[1:])), **options,
        )  # fmt: skip

    async def produce(self, batch: TaskBatch, generated: Callable[[], None]) -> None:
        self.begun += [(index, self.version) for index in batch.indices]
        first = self.version
        await asyncio.sleep(max(map(self.lasts, batch.indices)))
        for index in batch.indices:
            sample = Sample([1], [2, 3], [0.0, 0.0], [1, 1], [first, self.version])
            batch.groups.append(Group(TASKS[index], [Rollout(f"t{index}#0", f"t{index}", 0, [], [sample], reward=1.0)]))
        generated()
        await asyncio.sleep(0)
        batch.logged.append((len(batch.indices), {"m": 1.0}))

    async def train(self, step: int, *, seconds: float = 0.0, in_flight: bool = False) -> Taken:
        """One turn of the loop."""
        self.scheduler.advance(step - 1, self.version)
        taken = await self.scheduler.take(step, self.version)
        await asyncio.sleep(seconds)
        if not in_flight:
            await self.scheduler.drain()
        self.version = step
        return taken


async def train_on(world: World, steps: range) -> None:
    for step in steps:
        await world.train(step)


def ids(taken: Taken) -> list[int]:
    return [int(group.task.id[1:]) for group in taken.groups]


async def test_off_begins_a_step_when_the_one_before_was_trained() -> None:
    world = World(OverlapConfig())
    for step in range(1, 7):
        assert len(world.begun) == 3 * (step - 1), "nothing runs ahead"
        taken = await world.train(step)
        assert staleness(taken.groups, step - 1)["rollout/staleness_max"] == 0
        assert ids(taken) == ORDER[step - 1]
    assert world.scheduler.state_dict()["batches"] == []


async def test_pipeline_generates_the_next_step_while_one_trains() -> None:
    world = World(OverlapConfig(async_mode="pipeline"))
    for step in range(1, 7):
        taken = await world.train(step, seconds=0.01)
        assert ids(taken) == ORDER[step - 1]
        ages = {step - 1 - v for group in taken.groups for v in versions_of(group)}
        assert ages == ({0} if step == 1 else {1})
    assert len(world.begun) == 18, "nothing is begun that no step will train on"


async def test_pipeline_steps_get_their_own_groups_even_if_a_later_one_is_scored_first() -> None:
    world = World(OverlapConfig(async_mode="pipeline"))
    world.lasts = lambda index: 0.03 if index < 3 else 0.001
    assert [ids(await world.train(step)) for step in (1, 2)] == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("ahead", "over"), [(1, 1.0), (2, 1.0), (1, 1.7)])
async def test_queue_keeps_its_bound_and_loses_nothing(seed: int, ahead: int, over: float) -> None:
    """Attempts of very different lengths, weights that change in the middle of them: no token that is trained on is
    older than allowed, every step is whole, and each task that was drawn was trained on or counted as dropped."""
    rng = random.Random(seed)
    world = World(OverlapConfig(async_mode="queue", max_staleness=ahead, over_sampling=over), steps=20)
    length = {index: rng.choice([0.001, 0.002, 0.02]) for index in range(len(TASKS))}
    world.lasts = lambda index: length[index]
    trained: list[int] = []
    dropped = 0
    for step in range(1, 21):
        taken = await world.train(step, seconds=rng.choice([0.0, 0.004]), in_flight=True)
        assert len(taken.groups) == 3
        assert staleness(taken.groups, step - 1)["rollout/staleness_max"] <= ahead
        assert [t.number for t in taken.batches] == sorted(t.number for t in taken.batches)
        trained += ids(taken)
        dropped += taken.counts["dropped"]
    assert world.scheduler.batches == []
    drawn = world.order.epoch * len(TASKS) + world.order.position
    assert len(trained) + dropped == drawn
    if not dropped:
        assert set(Counter(trained).values()) == {6}


@pytest.mark.parametrize(
    ("useful", "rounds", "drawn"),
    [({0, 1, 2}, 5, []), ({0, 3, 4}, 5, [2]), ({0, 5, 9}, 5, [2, 2, 1, 1, 1]), (set(), 2, [3, 3]), ({0, 7}, 2, [2, 2])],
)
async def test_a_whole_batch_is_filled_up_round_by_round(useful: set[int], rounds: int, drawn: list[int]) -> None:
    world = World(OverlapConfig(), max_resamples=rounds)
    world.has_signal = lambda index: index in useful
    taken = await world.train(1)
    assert [len(batch.indices) for batch in taken.batches] == [3, *drawn]
    assert ids(taken) == list(range(3 + sum(drawn)))
    assert taken.resamples == len(drawn)
    assert len({batch.again for batch in taken.batches}) == len(taken.batches), "another seed each time"
    world.has_signal = lambda index: True
    assert ids(await world.train(2)) == [(3 + sum(drawn) + k) % 10 for k in range(3)], (
        "the next step goes on from there"
    )


async def test_queue_takes_what_ends_first_and_carries_the_rest() -> None:
    world = World(OverlapConfig(async_mode="queue", max_staleness=2), steps=3)
    world.lasts = lambda index: 0.015 if index == 1 else 0.001
    first = await world.train(1, in_flight=True)
    assert 1 not in ids(first)
    later = [ids(await world.train(step, seconds=0.02, in_flight=True)) for step in (2, 3)]
    assert 1 in later[0] + later[1], "it went on under newer weights"
    assert world.begun.count((1, 0)) == 1
    assert sum(index == 1 for index, _ in world.begun) == 1


async def test_what_gets_too_old_is_dropped_or_kept_as_told() -> None:
    for kind, expected in (("drop", 1), ("correct", 0)):
        world = World(OverlapConfig(async_mode="queue", max_staleness=1, stale_rollouts=kind))
        world.lasts = lambda index: 0.03 if index == 1 else 0.001
        taken = [await world.train(step, seconds=0.01, in_flight=True) for step in range(1, 5)]
        assert sum(t.counts["dropped"] for t in taken) == expected
        assert any(1 in ids(t) for t in taken) == (kind == "correct")
        await world.scheduler.close()


async def test_dropped_rollouts_are_handed_over_for_the_record() -> None:
    world = World(OverlapConfig(async_mode="queue", max_staleness=1))
    world.scheduler.advance(0, 0)
    await asyncio.sleep(0.02)  # all of steps 1 and 2 are done, sampled by version 0
    world.version = 5
    world.scheduler.advance(4, 5)
    await asyncio.sleep(0.02)
    taken = await world.scheduler.take(5, 5)
    assert len(taken.dropped) == taken.counts["dropped"] == 6
    rollout = taken.dropped[0].rollouts[0]
    assert rollout.status == "failed"
    assert rollout.error == "dropped: sampled by weights 5 versions old (max_staleness: 1)"
    assert all(v == 5 for group in taken.groups for v in versions_of(group))


async def test_over_sampling_stops_the_slow_ones_and_begins_them_anew() -> None:
    world = World(OverlapConfig(over_sampling=1.4), steps=4)  # ceil(1.2) = 2 more than 3
    world.lasts = lambda index: 0.2 if index in (1, 2) and world.version == 0 else 0.001
    taken = await world.train(1, seconds=0.01)
    assert ids(taken) == [0, 3, 4]
    assert world.begun == [(index, 0) for index in range(5)]
    second = await world.train(2)
    assert staleness(second.groups, 1)["rollout/staleness_max"] == 0
    assert (taken.counts["stopped"], second.counts["unused"]) == (2, 0), "what was stopped had nothing to show"
    assert world.begun[5:7] == [(1, 1), (2, 1)], "the same tasks again, under the new weights"
    assert all(version == 1 for _, version in world.begun[5:])


async def test_over_sampling_hands_over_what_ended_too_late() -> None:
    """All end at once: three are trained on, the other two are for the record, and restarted."""
    world = World(OverlapConfig(over_sampling=1.4), steps=4)
    first = await world.train(1, seconds=0.01)
    assert first.dropped == []
    second = await world.train(2)
    assert [group.task.id for group in second.dropped] == ["t3", "t4"]
    assert (second.counts["unused"], second.counts["dropped"]) == (2, 0)
    late = second.dropped[0].rollouts[0]
    assert late.status == "failed"
    assert "unused: it ended when its step had enough groups" in (late.error or "")
    assert ids(second) == [3, 4, 5], "sampled again"


async def test_a_dataset_smaller_than_a_batch_has_a_seed_for_each_attempt() -> None:
    world = World(OverlapConfig(async_mode="queue"), batch=25, steps=1)
    world.scheduler.advance(0, 0)
    assert len({(batch.indices[0], batch.again) for batch in world.scheduler.batches}) == 25
    await world.scheduler.close()


@pytest.mark.parametrize("modes", [("queue", "pipeline"), ("pipeline", "queue")])
async def test_what_is_in_flight_is_not_gone_on_with_in_another_way(modes: tuple[str, str]) -> None:
    world = World(OverlapConfig(async_mode=modes[0]))
    world.scheduler.advance(0, 0)
    state = world.scheduler.state_dict()
    await world.scheduler.close()
    overlap = OverlapConfig(async_mode=modes[1])
    with pytest.raises(ConfigError, match="groups in flight, which with these options"):
        World(overlap).scheduler.load_state_dict(state, TASKS)
    with pytest.raises(ConfigError, match="of tasks that the dataset no longer has"):
        world.scheduler.load_state_dict(state, TASKS[:2])


async def test_a_surplus_does_not_keep_replacements_waiting() -> None:
    """Tasks of the next step that are begun early wait in line before a task resampled for this one."""
    world = World(OverlapConfig(over_sampling=1.4), steps=3, max_resamples=9)
    world.has_signal = lambda index: index >= 5
    world.lasts = lambda index: 30.0 if index in (3, 4) else 0.001
    async with asyncio.timeout(5):
        taken = await world.train(1)
    assert sum(index >= 5 for index in ids(taken)) == 3
    await world.scheduler.close()


async def test_groups_without_a_signal_are_resampled_up_to_a_bound() -> None:
    world = World(OverlapConfig(async_mode="queue", max_staleness=1), max_resamples=1)
    world.has_signal = lambda index: index % 2 == 0
    taken = await world.train(1, in_flight=True)
    assert sum(i % 2 == 0 for i in ids(taken)) == 3
    assert sum(i % 2 == 1 for i in ids(taken)) <= 3
    hopeless = World(OverlapConfig(async_mode="queue", max_staleness=1), max_resamples=2)
    hopeless.has_signal = lambda index: False
    assert len((await hopeless.train(1, in_flight=True)).groups) == 9
    await world.scheduler.close()
    await hopeless.scheduler.close()


@pytest.mark.parametrize("when", ["generating", "scoring"])
@pytest.mark.parametrize("mode", ["pipeline", "queue"])
async def test_a_failed_attempt_is_raised_when_the_step_comes(mode: str, when: str) -> None:
    """Nothing waits for it meanwhile, neither before a step's weights are sent nor with what else runs ahead."""
    world = World(OverlapConfig(async_mode=mode, **({"in_flight_updates": False} if mode == "queue" else {})))
    original = world.produce

    async def produce(batch: TaskBatch, generated: Callable[[], None]) -> None:
        if when == "generating" and 4 in batch.indices:
            raise RewardError("no such column")
        await original(batch, generated)
        if 4 in batch.indices:
            raise RewardError("no such column")

    world.scheduler.produce = produce
    async with asyncio.timeout(10):
        if mode == "pipeline":
            await world.train(1, seconds=0.01)  # it has its own batch
        with pytest.raises(RewardError, match="no such column"):
            await train_on(world, range(2 if mode == "pipeline" else 1, 4))
        await world.scheduler.drain()
    assert world.scheduler.unused() or when == "generating", "what was generated can still be written down"
    await world.scheduler.close()


@pytest.mark.parametrize("mode", ["off", "queue"])
async def test_work_that_somebody_else_cancels_is_an_error_and_not_waited_for(mode: str) -> None:
    world = World(OverlapConfig(async_mode=mode))

    async def produce(batch: TaskBatch, generated: Callable[[], None]) -> None:
        helper = asyncio.ensure_future(asyncio.sleep(60))
        asyncio.get_running_loop().call_soon(helper.cancel)
        await helper

    world.scheduler.produce = produce
    async with asyncio.timeout(10):
        with pytest.raises(TrainingError, match=r"step 1 .* cancelled, and not by the run"):
            await world.train(1)
    await world.scheduler.close()


@pytest.mark.parametrize("mode", ["pipeline", "queue"])
async def test_a_checkpoint_holds_what_is_in_flight(mode: str) -> None:
    """Restored in another process, the same groups are trained on, and nothing that was begun is forgotten."""
    overlap = OverlapConfig(async_mode=mode)
    world = World(overlap)
    world.lasts = lambda index: 0.05 if index == 4 else 0.001
    first = ids(await world.train(1, seconds=0.01, in_flight=mode == "queue"))
    await world.scheduler.finish_in_flight()
    state = json.loads(json.dumps({"scheduler": world.scheduler.state_dict(), "order": world.order.state_dict()}))
    await world.scheduler.close()
    done = [t for t in state["scheduler"]["batches"] if "groups" in t]
    assert (len(done), len(state["scheduler"]["batches"])) == ((1, 1) if mode == "pipeline" else (2, 3))

    other = World(overlap)
    other.version = 1
    other.order.load_state_dict(state["order"])
    other.scheduler = make_scheduler(other.order, overlap, other.produce, total_steps=6, step=1)
    other.scheduler.load_state_dict(state["scheduler"], TASKS)
    later = [ids(await other.train(step)) for step in range(2, 7)]
    assert sorted([*first, *(index for step in later for index in step)][:10]) == list(range(10))
    again = {index for index, _ in other.begun[:3]}
    assert (4 in again) == (mode == "queue"), "what was not done is restarted; what was is not"
    assert not {0, 1, 2} & again


def versions_of(group: Group) -> list[int]:
    return [v for r in group.rollouts for s in r.samples for v in s.policy_version]  # type: ignore[union-attr]
