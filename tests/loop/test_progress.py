"""What a run is doing, told to the record and to the display alike."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mrl.errors import WorkerDied
from mrl.loop import progress
from mrl.loop.progress import RunProgress, WorkerWatch
from mrl.store.progress import WorkerHealth
from mrl.store.read import RunReader
from mrl.tracking.console import ConsoleTracker
from mrl.trainer import MRLTrainer


class Trackers:
    def __init__(self) -> None:
        self.phases: list[str] = []

    def phase(self, name: str, detail: str = "") -> None:
        self.phases.append(f"{name} {detail}".strip())


class Worker:
    """A rollout worker's handle. answer: what `progress` gives or raises; None = it never answers."""

    def __init__(self, name: str, answer: Any) -> None:
        self.name, self.answer, self.calls = name, answer, 0

        self.killed = 0

    async def kill(self) -> None:
        self.killed += 1

    async def call(self, method: str) -> Any:
        assert method == "progress"
        self.calls += 1
        if self.answer is None:
            await asyncio.sleep(600)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def alive(self) -> bool:
        return bool(self.answer)


def served(version: int | None, tokens: int | None) -> dict[str, int | None]:
    return {"version": version, "sampled_tokens": tokens}


async def test_tokens_count_from_the_beginning_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "EVERY_SECONDS", 0.01)
    trackers, counting, stage = Trackers(), Worker("rollout-0", served(3, 5000)), "generating"
    told = RunProgress(trackers)  # type: ignore[arg-type]
    told.begin("generating", 1, groups_wanted=8)

    async def until(phase: str) -> None:
        while trackers.phases[-1] != phase:
            await asyncio.sleep(0.01)

    async with asyncio.timeout(60), told.watching(lambda: told.stage(stage), lambda: [counting], list):  # type: ignore[list-item]
        assert trackers.phases == ["generating"]
        while not counting.calls:
            await asyncio.sleep(0.01)
        counting.answer = served(3, 6234)
        await until("generating 1,234 tokens")
        told.facts.groups_done = 2
        await until("generating 2/8 groups, 1,234 tokens")
        stage = "scoring"
        await until("scoring")
        told.begin("generating", 2, groups_wanted=4)
        stage = "generating"
        counting.answer = served(4, 6240)
        await until("generating 6 tokens")
    assert (told.facts.step, told.facts.groups_wanted) == (2, 4)
    assert told.facts.workers == [WorkerHealth("rollout-0", True, 4, 0)]


async def test_workers_that_are_gone_silent_or_replaced() -> None:
    silent, gone = Worker("rollout-0", None), Worker("rollout-1", WorkerDied("gone"))
    odd = Worker("rollout-2", RuntimeError("odd"))
    old, new = Worker("rollout-3", served(1, 100)), Worker("rollout-3", served(2, 7))
    workers = [silent, gone, odd, old]
    others = [Worker("actor", True), Worker("reward", False)]
    watch = WorkerWatch()

    async def look() -> int:
        await asyncio.sleep(0.01)
        return watch.look(workers, others)  # type: ignore[arg-type]

    sampled = sum([await look() for _ in range(4)])
    workers[3] = new
    sampled += sum([await look() for _ in range(4)])
    assert silent.calls == 1, "one that does not answer is not asked again"
    assert sampled == 7, "a new worker's engine counts from 0"
    health = {worker.name: (worker.alive, worker.version) for worker in watch.health()}
    assert health == {
        "rollout-0": (True, None),
        "rollout-1": (False, None),
        "rollout-2": (False, None),
        "rollout-3": (True, 2),
        "actor": (True, None),
        "reward": (False, None),
    }
    assert next(worker.restarts for worker in watch.health() if worker.name == "rollout-3") == 1
    watch.close()


async def test_a_worker_that_says_nothing_for_too_long_is_ended() -> None:
    silent, reward = Worker("rollout-0", None), Worker("reward-0", True)
    watch, told = WorkerWatch(), list[str]()
    watch.silence, watch.note = 3 * progress.EVERY_SECONDS, told.append
    for _ in range(8):
        watch.look([silent], [reward])  # type: ignore[list-item]
        await asyncio.sleep(0)
    assert (silent.killed, reward.killed) == (1, 0)
    assert told == ["rollout-0 has not said anything for 2 s and is ended"]
    assert not watch.health()[0].alive
    watch.close()


async def test_a_look_that_stumbles_does_not_stop_the_run() -> None:
    told = RunProgress(Trackers())  # type: ignore[arg-type]
    async with told.watching(lambda: 1 / 0 and None, list, list):
        await asyncio.sleep(0.02)


def test_a_step_can_be_looked_at_while_it_happens(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its second step's rewards wait until the record was seen to say what the run is doing; so did the display."""
    shown: list[str] = []
    phase: Callable[..., None] = ConsoleTracker.phase
    monkeypatch.setattr(
        ConsoleTracker, "phase", lambda self, name, detail="": (shown.append(name), phase(self, name, detail))[1]
    )
    seen: dict[str, Any] = {}
    looked, told = threading.Event(), tmp_path / "looked"

    def look() -> None:
        while not (tmp_path / "run" / "config.yaml").exists():
            looked.wait(0.02)
        with RunReader(tmp_path / "run") as reader:
            while not looked.wait(0.02):
                now = reader.progress() or {}
                if (now.get("stage"), now.get("step")) == ("scoring", 2) and now["tokens"]:
                    seen.update(now)
                    told.touch()
                    looked.set()

    def reward(completions: list[str], trainer_state: Any, **_: Any) -> list[float]:
        patience = time.monotonic() + 60
        while trainer_state.global_step == 2 and not told.exists():
            assert time.monotonic() < patience, "nobody saw it"
            time.sleep(0.02)
        return [float(len(text)) for text in completions]

    watching = threading.Thread(target=look, daemon=True)
    watching.start()
    trainer = MRLTrainer(
        model=tiny_model,
        reward_funcs=reward,
        train_dataset=[{"prompt": "ab"}, {"prompt": "cd"}],
        max_steps=2,
        batch_size=2,
        num_generations=2,
        max_completion_length=4,
        run_dir=str(tmp_path / "run"),
    )
    result = trainer.train()
    looked.set()
    assert result.status == "finished"
    assert (seen["groups_wanted"], seen["groups_done"], seen["in_flight"]) == (2, 0, 0)
    assert 0 < seen["tokens"] <= 2 * 2 * 4 * 2
    health = {worker["name"]: (worker["alive"], worker["version"]) for worker in seen["workers"]}
    assert health == {"rollout-0": (True, 1), "actor": (True, None), "reward-0": (True, None)}
    with RunReader(tmp_path / "run") as reader:
        ended = reader.progress() or {}
    assert (ended["stage"], ended["step"]) == ("finished", 2)
    assert {"loading", "generating", "scoring", "training", "saving"} <= set(shown)
