"""Attempts of the source with a scripted policy, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mrl.rollouts.openenv.source import OpenEnvSource
from mrl.rollouts.runner import Runner
from mrl.types import Rollout, Task
from tests.rollouts.scripted import Scripted, setup

ROWS = [{"prompt": "Play.", "secret": number} for number in range(4)]


def tasks(rows: Sequence[dict[str, Any]] = ROWS) -> list[Task]:
    return [
        Task(str(number), row["prompt"], {k: v for k, v in row.items() if k != "prompt"})
        for number, row in enumerate(rows)
    ]


def source_of(rows: Sequence[dict[str, Any]] = ROWS, limits: Any = None, **options: Any) -> OpenEnvSource:
    source = OpenEnvSource.create(setup(limits), **options)
    source.check_tasks(tasks(rows))
    return source


async def play(
    source: OpenEnvSource, says: Sequence[Any], n: int = 1, rows: Sequence[dict[str, Any]] = ROWS, **policy: Any
) -> list[Rollout]:
    """All attempts at once; `source` is left open."""
    groups = await Runner(source, Scripted(says, **policy)).run(tasks(rows), n, seed=0)
    return [rollout for group in groups for rollout in group.rollouts]


async def outcome(
    says: Sequence[Any], n: int = 1, rows: Sequence[dict[str, Any]] = ROWS, limits: Any = None, **options: Any
) -> list[Rollout]:
    """From start to end."""
    source = source_of(rows, limits, **options)
    try:
        await source.start(None)
        return await play(source, says, n, rows)
    finally:
        await source.close()
