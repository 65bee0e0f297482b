"""Judges asked for scores, and what they say."""

from __future__ import annotations

import asyncio
from typing import Any

from mrl.rewards.base import RewardRequest, Scores
from mrl.rewards.judge import Judge


def rows(*completions: Any, prompt: Any = "say it", task: str = "t", **columns: Any) -> list[RewardRequest]:
    return [RewardRequest(f"{task}#{k}", prompt, c, [], columns, task) for k, c in enumerate(completions)]


def score(judge: Judge, requests: list[RewardRequest]) -> Scores:
    async def ask() -> Scores:
        try:
            return await judge.score(requests, trainer_state=None)
        finally:
            await judge.close()

    return asyncio.run(ask())


def metric(scores: Scores, name: str) -> float:
    (value,) = scores.metrics[f"reward/judge/{name}"]
    return value
