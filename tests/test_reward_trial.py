"""Reward functions tried before a run."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

import mrl.reward_trial
from mrl.config import OrchestratorConfig
from mrl.reward_trial import try_rewards
from mrl.types import Task


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_slow_function_is_neither_waited_for_nor_judged(asynchronous: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mrl.reward_trial, "TRIAL_SECONDS", 0.05)
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
