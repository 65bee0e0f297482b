"""Threads of a process that trains: at no moment have two of them a team of OpenMP's."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mrl import MRLTrainer
from mrl.actor.worker import ActorWorker
from mrl.engines.transformers.decode_calls import DecodeThread
from mrl.system.threads import SerialExecutor, in_thread, release_openmp_threads
from mrl.workers.rollout import RolloutWorker
from tests.conftest import build_model

TEAM = 5
"""Threads of a team, its owner included."""


class Teams:
    """Counts the threads of this process that Python did not make, in teams; those from before are not counted."""

    def __init__(self) -> None:
        self.before = self.others()
        self.seen: list[tuple[str, int]] = []

    @staticmethod
    def others() -> int:
        mine = {thread.native_id for thread in threading.enumerate()}
        return sum(int(task) not in mine for task in os.listdir("/proc/self/task"))

    def count(self) -> int:
        """Libraries that are imported meanwhile may bring a thread or two."""
        return (self.others() - self.before) // (TEAM - 1)

    def look(self, where: str, most: int = 1) -> None:
        """most: teams that may be there; threads that are ending get a moment to be gone."""
        end = time.monotonic() + 5
        if self.seen and self.seen[-1][1] > 1:
            return  # it has failed already
        while self.count() > most and time.monotonic() < end:
            time.sleep(0.005)
        self.seen.append((where, self.count()))

    def watch(self, monkeypatch: pytest.MonkeyPatch, owner: type, method: str) -> None:
        """Look whenever the method has returned, on its own thread."""
        plain: Callable[..., Any] = getattr(owner, method)

        def watched(*args: Any, **kwargs: Any) -> Any:
            result = plain(*args, **kwargs)
            self.look(method)
            return result

        monkeypatch.setattr(owner, method, watched)


@pytest.fixture
def teams() -> Iterator[Teams]:
    threads = torch.get_num_threads()
    release_openmp_threads()
    torch.set_num_threads(TEAM)
    yield Teams()
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted where Linux shows them")
@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_never_has_two_teams_of_threads(
    teams: Teams, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """In loading, decoding, scoring, training, sync, checkpoints; and none is left when the run is over."""
    model = build_model(tmp_path / "model", hidden_size=128, intermediate_size=512)
    for owner, method in (
        (ActorWorker, "initialize"),
        (ActorWorker, "train_step"),
        (ActorWorker, "write_weights"),
        (RolloutWorker, "update_weights"),
        (DecodeThread, "ended"),
    ):
        teams.watch(monkeypatch, owner, method)

    def reward(completions: list[str], **_: Any) -> list[float]:
        teams.look("reward")
        return [len(set(text)) / 8 for text in completions]

    torch.randn(1 << 17).mul(2.0)  # what a notebook did before
    MRLTrainer(
        model=str(model),
        device="cpu",
        train_dataset=[{"prompt": f"say {i}"} for i in range(8)],
        eval_dataset=[{"prompt": "say"}],
        reward_funcs=reward,
        run_dir=str(tmp_path / "run"),
        report_to=[],
        batch_size=8,
        num_generations=8,
        max_completion_length=12,
        temperature=1.0,
        beta=0.1,
        num_rollout_workers=workers,
        max_steps=2,
        save_steps=1,
    ).train()
    assert max(count for _, count in teams.seen) == 1, teams.seen
    assert {where for where, count in teams.seen if count} >= {"train_step", "ended"}, teams.seen
    teams.look("the end", most=0)
    assert teams.seen[-1][1] == 0


async def test_a_team_is_given_back_when_its_thread_ends(teams: Teams) -> None:
    def compute() -> int:
        torch.randn(1 << 17).mul(2.0)
        return teams.count()

    assert await in_thread(compute) == 1
    assert await asyncio.wrap_future(SerialExecutor("x").submit("compute", compute)) <= 2  # the first may be ending
    assert compute() >= 1
    release_openmp_threads()
    teams.look("after", most=0)
    assert teams.seen[-1][1] == 0
