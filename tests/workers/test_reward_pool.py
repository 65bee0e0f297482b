"""Several reward workers as one: shares, what they log, and deaths."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrl.backends import Resources, WorkerHandle
from mrl.backends.inline import InlineBackend
from mrl.errors import RewardError, WorkerDied
from mrl.rewards.base import RewardReport, RewardRequest
from mrl.types import Group, Rollout, Sample, Task
from mrl.workers.reward import RewardWorker
from mrl.workers.reward_pool import RewardPool, share_out
from mrl.workers.scoring import TrainerState, score_groups
from tests.backends.workers import Drawer, Scorer
from tests.process_backend import ProcessBackend

STATE = TrainerState(3, 10, 0.0)


def requests(tasks: list[int], deadly: bool = False) -> list[RewardRequest]:
    """So many rollouts of each task, completions of different lengths."""
    return [
        RewardRequest(f"{'deadly' if deadly else 't'}{task}#{k}", "p", "x" * (task + k), [], {}, f"t{task}")
        for task, count in enumerate(tasks)
        for k in range(count)
    ]


async def pool_of(backend: Any, count: int, *, deaths: Path | None = None, **options: Any) -> RewardPool:
    spawned: list[str] = []

    async def spawn(index: int) -> WorkerHandle:
        spawned.append(f"reward-{index}")
        args = {"name": f"{index}.{spawned.count(spawned[-1])}", "deaths": None if deaths is None else str(deaths)}
        handle: WorkerHandle = await backend.spawn(Scorer, name=spawned[-1], resources=Resources(), args=args)
        return handle

    return RewardPool([await spawn(index) for index in range(count)], spawn, **options)


@pytest.fixture
async def processes() -> AsyncIterator[ProcessBackend]:
    backend = ProcessBackend(60.0)
    yield backend
    await backend.close()


@given(tasks=st.lists(st.integers(1, 5), min_size=1, max_size=12), workers=st.integers(1, 5))
def test_shares_hold_every_row_once_and_whole_tasks(tasks: list[int], workers: int) -> None:
    rows = requests(tasks)
    shares = share_out(rows, workers)
    assert sorted(row for share in shares for row in share) == list(range(len(rows)))
    assert all(share == sorted(share) for share in shares)
    assert len(shares) == min(workers, len(tasks))
    places = {rows[row].task_id: {k for k, share in enumerate(shares) if row in share} for row in range(len(rows))}
    assert all(len(found) == 1 for found in places.values())
    sizes = [len(share) for share in shares]
    assert len(shares) < workers or max(sizes) - min(sizes) <= max(tasks)


async def test_one_worker_gets_the_whole_batch_and_its_report_is_the_answer() -> None:
    seen: list[int] = []

    class Whole(Scorer):
        async def score(self, requests: list[Any], state: Any) -> RewardReport:
            seen.append(len(requests))
            report: RewardReport = await super().score(requests, state)
            report.metrics["third"] = 0.1
            return report

    backend = InlineBackend(60.0)

    async def spawn(index: int) -> WorkerHandle:
        return await backend.spawn(Whole, name="reward-0", resources=Resources(), args={"name": "0"})

    report = await RewardPool([await spawn(0)], spawn).score(requests([3, 3, 3]), STATE)
    assert seen == [9]
    assert report.metrics == {"rows": 9.0, "step": 3.0, "third": 0.1}


@pytest.mark.slow
async def test_results_come_in_order_and_logged_means_by_weight(processes: ProcessBackend) -> None:
    pool = await pool_of(processes, 2)
    rows = requests([2, 4, 3])
    report = await pool.score(rows, STATE)
    assert [result.reward for result in report.results] == [float(len(row.completion)) for row in rows]
    assert [result.extra["by"] for result in report.results] == ["1.1"] * 2 + ["0.1"] * 4 + ["1.1"] * 3
    assert report.metrics == {"rows": pytest.approx((4 * 4 + 5 * 5) / 9), "step": 3.0}
    assert pool.load == [0, 0]


@pytest.mark.slow
async def test_a_worker_that_dies_is_replaced_and_its_work_runs_again(
    processes: ProcessBackend, tmp_path: Path
) -> None:
    deaths, notes = tmp_path / "deaths", []
    deaths.write_text("1")
    pool = await pool_of(processes, 2, deaths=deaths, note=notes.append)
    rows = [*requests([2], deadly=True), *requests([0, 2])]
    report = await pool.score(rows, STATE)
    assert [result.extra["by"] for result in report.results] == ["0.2", "0.2", "1.1", "1.1"]
    assert len(notes) == 1
    assert notes[0].startswith("reward-0 is replaced, and what it was scoring is scored again: reward-0: its process")


@pytest.mark.slow
async def test_what_ends_two_workers_in_turn_is_no_reward(processes: ProcessBackend, tmp_path: Path) -> None:
    deaths = tmp_path / "deaths"
    deaths.write_text("9")
    pool = await pool_of(processes, 1, deaths=deaths)
    with pytest.raises(RewardError, match=r"two workers in turn died scoring the same 2 rollouts.*its process died"):
        await pool.score(requests([2], deadly=True), STATE)
    assert deaths.read_text() == "7"
    report = await pool.score(requests([2]), STATE)  # by a third one
    assert [result.extra["by"] for result in report.results] == ["0.3", "0.3"]


@pytest.mark.slow
async def test_so_many_are_replaced_and_no_more(processes: ProcessBackend, tmp_path: Path) -> None:
    deaths = tmp_path / "deaths"
    deaths.write_text("9")
    pool = await pool_of(processes, 1, deaths=deaths, max_restarts=0)
    with pytest.raises(WorkerDied, match="reward-0: its process died"):
        await pool.score(requests([1], deadly=True), STATE)


async def test_what_arrives_scored_is_not_scored_again() -> None:
    pool = await pool_of(InlineBackend(60.0), 1)
    rollouts = [
        Rollout(f"t#{k}", "t", k, [], [Sample([1], [2], [0.0], [1], 0)], "p", "x" * (k + 1), reward=reward)
        for k, reward in enumerate([None, 0.5, None])
    ]
    rollouts[2].fail("it broke off")
    await score_groups(pool, [Group(Task("t", "p"), rollouts)], STATE)
    assert [rollout.reward for rollout in rollouts] == [1.0, 0.5, None]
    assert [rollout.error for rollout in rollouts] == [None, None, "it broke off"]
    assert rollouts[1].extra == {}


async def test_random_numbers_of_a_worker_of_its_own_depend_on_the_rollouts() -> None:
    """So that a worker that replaces another one, or scores in a resumed run, draws the same."""
    first, second = (RewardWorker([Drawer()], seed=5) for _ in range(2))
    rows = requests([2, 2])
    drawn = [await worker.score(rows[k:], STATE) for worker, k in ((first, 0), (first, 2), (second, 0), (second, 2))]
    assert drawn[0] == drawn[2]
    assert drawn[1] == drawn[3]
    assert drawn[0].results[0] != drawn[1].results[0]
    assert (await first.score(rows, TrainerState(4, 10, 0.0))).results != drawn[0].results
