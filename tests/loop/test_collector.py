"""When rollouts are scored: group by group while others are sampled, or all together."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from mrl.config import OrchestratorConfig
from mrl.loop.collector import Collector
from mrl.loop.preflight import prepare
from mrl.rewards.base import RewardReport, RewardRequest, RewardResult
from mrl.rollouts.runner import Runner, rollout_id
from mrl.types import Group, Rollout, Task
from mrl.workers.scoring import TrainerState

TASKS = [Task("quick", "p"), Task("slow", "p")]


class Rewards:
    """Scores every rollout 1, and lets slow tasks end once it has been asked."""

    def __init__(self, asked: asyncio.Event) -> None:
        self.asked, self.calls = asked, []

    async def score(self, requests: list[RewardRequest], state: Any) -> RewardReport:
        self.calls.append([request.rollout_id for request in requests])
        self.asked.set()
        return RewardReport([RewardResult(1.0, {"f": 1.0}) for _ in requests], {"logged": 1.0})


class Source:
    def __init__(self, goes_on: asyncio.Event) -> None:
        self.goes_on = goes_on

    @classmethod
    def create(cls, setup: Any) -> Source:
        raise NotImplementedError

    async def run(self, task: Task, attempt: int, policy: Any, seed: int) -> Rollout:
        if task.id == "slow":
            await self.goes_on.wait()
        return Rollout(rollout_id(task, attempt), task.id, attempt, [], [])


async def collect(early: bool) -> tuple[list[list[str]], list[list[float | None]], list[int]]:
    asked = asyncio.Event()
    if not early:
        asked.set()  # it is asked only when everything was sampled
    rewards = Rewards(asked)
    collector = Collector(Runner(Source(asked), None), rewards, early)  # type: ignore[arg-type]
    async with asyncio.timeout(5):
        done = await collector.collect(TASKS, 2, seed=0, state=TrainerState(0, 1, 0.0))
    scores = [[rollout.reward for rollout in group.rollouts] for group in done.groups]
    return rewards.calls, scores, [count for count, _ in done.logged]


async def test_early_scoring_does_not_wait_for_the_last_attempt() -> None:
    """The slow task ends only when the quick one is being scored."""
    calls, scores, logged = await collect(early=True)
    assert calls == [["quick#0", "quick#1"], ["slow#0", "slow#1"]]
    assert scores == [[1.0, 1.0], [1.0, 1.0]]
    assert logged == [2, 2]


async def test_else_all_rollouts_come_in_one_call() -> None:
    calls, scores, logged = await collect(early=False)
    assert calls == [["quick#0", "quick#1", "slow#0", "slow#1"]]
    assert scores == [[1.0, 1.0], [1.0, 1.0]]
    assert logged == [4]


@pytest.mark.parametrize("early", [True, False])
async def test_without_tasks_nobody_is_asked(early: bool) -> None:
    told: list[list[Group]] = []
    rewards = Rewards(asyncio.Event())
    collector = Collector(Runner(Source(asyncio.Event()), None), rewards, early)  # type: ignore[arg-type]
    done = await collector.collect([], 2, seed=0, state=TrainerState(0, 1, 0.0), generated=told.append)
    assert (done.groups, done.logged, told, rewards.calls) == ([], [], [[]], [])
    assert set(done.seconds) == {"generate", "reward"}


@pytest.mark.parametrize(
    ("engine", "function", "early"),
    [
        pytest.param(
            *("transformers", "own", False), marks=pytest.mark.inline("its subject is a sampler in this process")
        ),
        ("vllm-remote", "own", True),
        ("vllm-remote", "len", False),
    ],
)
def test_who_samples_on_this_cpu_is_not_disturbed(
    tiny_model: str, tmp_path: Path, engine: str, function: str, early: bool
) -> None:
    def lengths(completions: list[str], **_: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    config = OrchestratorConfig.from_flat(
        model=tiny_model,
        device="cpu",
        engine=engine,
        vllm_urls=["http://127.0.0.1:1"] if engine == "vllm-remote" else [],
        reward_funcs="own" if function == "own" else lengths,
        train_dataset=[{"prompt": "a"}, {"prompt": "b"}],
        run_dir=str(tmp_path),
        batch_size=2,
    )
    assert prepare(config).early_scoring is early
