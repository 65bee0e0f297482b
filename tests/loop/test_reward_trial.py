"""Reward functions tried before a run."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

import mrl.loop.reward_trial
from mrl import MRLTrainer
from mrl.config import OrchestratorConfig
from mrl.loop.reward_trial import try_rewards
from mrl.types import Task


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_slow_function_is_neither_waited_for_nor_judged(asynchronous: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mrl.loop.reward_trial, "TRIAL_SECONDS", 0.05)
    ended = threading.Event()

    def slow(completions: list[str], **_: Any) -> list[float]:
        ended.wait(60)
        return [0.0] * len(completions)

    async def slow_async(completions: list[str], **_: Any) -> list[float]:
        await asyncio.sleep(60)
        return [0.0] * len(completions)

    config = OrchestratorConfig.from_flat(reward_funcs=slow_async if asynchronous else slow)
    assert asyncio.run(try_rewards(config, [Task("t", "say a", {})], 1)) == []
    assert not ended.is_set()
    ended.set()


@pytest.mark.parametrize("wanted", [True, False])
def test_the_trial_is_told_of_and_can_be_switched_off(wanted: bool) -> None:
    called, told = [], []

    def judge(completions: list[str], **_: Any) -> list[float]:
        called.append(completions)
        return [0.0] * len(completions)

    config = OrchestratorConfig.from_flat(reward_funcs=[judge, "sandbox"], reward_trial=wanted)
    tasks = [Task("t", "say a", {"testcases": ["assert True"]})]
    assert asyncio.run(try_rewards(config, tasks, 1, tell=told.append)) == []
    assert told == ([["judge"]] if wanted else [])
    assert len(called) == wanted


def test_a_resumed_run_has_no_trial_again(tiny_model: str, tmp_path: Path) -> None:
    called = tmp_path / "called"

    def judge(completions: list[str], **_: Any) -> list[float]:
        with called.open("a") as file:
            print(len(completions), file=file)
        return [len(set(text)) / 8 for text in completions]

    def train(steps: int, **options: Any) -> None:
        sizes: dict[str, Any] = {"batch_size": 1, "num_generations": 3, "max_completion_length": 4, "device": "cpu"}
        folder, tasks = str(tmp_path / "r"), [{"prompt": "say a"}]
        MRLTrainer(
            model=tiny_model,
            train_dataset=tasks,
            reward_funcs=judge,
            run_dir=folder,
            report_to=[],
            max_steps=steps,
            **sizes,
            **options,
        ).train()

    train(1)
    train(2, resume="auto")
    assert list(map(int, called.read_text().split())) == [len(mrl.loop.reward_trial.ANSWERS), 3, 3]
