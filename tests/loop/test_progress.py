"""What a step waits for is shown while it waits."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mrl.errors import WorkerDied
from mrl.loop import progress
from mrl.loop.progress import showing_progress


class Trackers:
    shows_phases = True

    def __init__(self) -> None:
        self.phases: list[str] = []

    def phase(self, name: str, detail: str = "") -> None:
        self.phases.append(f"{name} {detail}".strip())


class Worker:
    def __init__(self, sampled: Any) -> None:
        self.sampled = sampled

    async def call(self, method: str) -> Any:
        assert method == "sampled_tokens"
        if isinstance(self.sampled, Exception):
            raise self.sampled
        return self.sampled


async def test_tokens_are_counted_from_where_the_wait_began(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "EVERY_SECONDS", 0.01)
    trackers, counting, generates = Trackers(), Worker(5000), True
    workers = [counting, Worker(None), Worker(WorkerDied("gone"))]

    async def until(phase: str) -> None:
        while trackers.phases[-1] != phase:
            await asyncio.sleep(0.01)

    async with asyncio.timeout(30), showing_progress(trackers, workers, lambda: generates):  # type: ignore[arg-type]
        assert trackers.phases == ["generating"]
        await asyncio.sleep(0.05)
        counting.sampled += 1234
        await until("generating 1,234 tokens")
        generates = False
        await until("scoring")


async def test_a_display_that_stumbles_does_not_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "EVERY_SECONDS", 0.0)
    async with showing_progress(Trackers(), [Worker(RuntimeError("odd"))], lambda: True):  # type: ignore[arg-type, list-item]
        await asyncio.sleep(0.02)
