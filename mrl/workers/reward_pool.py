"""The reward workers as one client: `score`, however many there are."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

from mrl.backends.base import WorkerHandle
from mrl.errors import RewardError, WorkerDied
from mrl.rewards.base import RewardReport, RewardRequest
from mrl.rewards.combine import mean_metrics
from mrl.system.gather import all_of

Spawn = Callable[[int], Awaitable[WorkerHandle]]


class RewardPool:
    """Spreads rollouts over reward workers. A worker that dies is replaced, and what it was scoring is retried once.

    spawn: makes the worker of a place. note: told of each replacement. max_restarts: replacements allowed in all.
    """

    def __init__(
        self,
        workers: list[WorkerHandle],
        spawn: Spawn,
        note: Callable[[str], None] = lambda message: None,
        max_restarts: int = 10,
    ) -> None:
        self.workers, self.spawn, self.note = workers, spawn, note
        self.restarts, self.max_restarts = 0, max_restarts
        self.load = [0] * len(workers)
        """Rollouts that each place is scoring."""
        self.replacing = asyncio.Lock()

    async def score(self, requests: list[RewardRequest], state: Any) -> RewardReport:
        """One result per request, in order; each `log_metric` name's mean over all of them. state: `trainer_state`.

        With one worker, it gets the whole batch. Raises RewardError when a reward breaks its contract or ends its
        worker twice, WorkerDied when too many workers have died.
        """
        shares = share_out(requests, len(self.workers))
        reports = await all_of([self._score([requests[row] for row in share], state) for share in shares])
        if len(reports) == 1:
            return reports[0]
        by_row = {
            row: result
            for share, report in zip(shares, reports, strict=True)
            for row, result in zip(share, report.results, strict=True)
        }
        metrics = [(len(share), report.metrics) for share, report in zip(shares, reports, strict=True)]
        return RewardReport([by_row[row] for row in range(len(requests))], mean_metrics(metrics))

    async def _score(self, requests: list[RewardRequest], state: Any) -> RewardReport:
        """Score on the least loaded worker; if it dies, retry once on its replacement."""
        place = self.load.index(min(self.load))
        self.load[place] += len(requests)
        worker, replaced = self.workers[place], False
        try:
            while True:
                try:
                    report: RewardReport = await worker.call("score", requests, state)
                    return report
                except WorkerDied as error:
                    if replaced:
                        raise RewardError(
                            f"reward_funcs: two workers in turn died scoring the same {len(requests)} rollouts; a "
                            f"function may end its process, or take longer than call_timeout: {error}"
                        ) from error
                    worker, replaced = await self._replacement(place, worker, error), True
        finally:
            self.load[place] -= len(requests)

    async def _replacement(self, place: int, worker: WorkerHandle, error: WorkerDied) -> WorkerHandle:
        """The dead worker's replacement: one, however many calls have failed. Raises WorkerDied when too many were
        replaced."""
        async with self.replacing:
            if self.workers[place] is worker:
                if self.restarts >= self.max_restarts:
                    raise error
                self.restarts += 1
                self.note(f"{worker.name} is replaced, and what it was scoring is scored again: {error}")
                await worker.kill()
                self.workers[place] = await self.spawn(place)
            return self.workers[place]


def share_out(requests: list[RewardRequest], workers: int) -> list[list[int]]:
    """The rows that each worker gets, as equal in number as whole tasks allow; no share is empty."""
    tasks: dict[str, list[int]] = {}
    for row, request in enumerate(requests):
        tasks.setdefault(request.task_id, []).append(row)
    shares: list[list[int]] = [[] for _ in range(workers)]
    for rows in sorted(tasks.values(), key=len, reverse=True):  # of equal size, in their order
        min(shares, key=len).extend(rows)
    return [sorted(share) for share in itertools.takewhile(bool, shares)]
