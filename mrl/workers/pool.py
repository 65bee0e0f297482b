"""The policy as rollout sources see it: one `generate`, however many workers are behind it."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from mrl.backends.base import WorkerHandle
from mrl.errors import EngineDied, SyncError, WorkerDied
from mrl.types import Completion, GenerateRequest

if TYPE_CHECKING:
    from mrl.sync.base import SyncReport, WeightSync

_AFFINITY = 8
"""Requests that a worker may be ahead of the idlest one and still get another of a prompt it has seen."""

Spawn = Callable[[int], Awaitable[WorkerHandle]]


class PolicyClient:
    """Spreads requests over rollout workers and puts the completions back in order.

    Workers with continuous batching (see `capacity` of the worker) get one request at a time, the idlest first, so that
    a long completion holds up nobody. Workers that decode a batch at a time get fixed shares, which keeps their
    batches, and so the last bits of their numbers, the same from run to run.

    spawn: makes a new worker for a place; without it a worker that fails is not replaced. note: told of each that was.
    """

    def __init__(
        self,
        workers: list[WorkerHandle],
        spawn: Spawn | None = None,
        note: Callable[[str], None] | None = None,
    ) -> None:
        self.workers = workers
        self.spawn, self.note = spawn, note or (lambda message: None)
        self.capacity: dict[str, int | None] = {}

    async def generate(self, requests: list[GenerateRequest]) -> list[Completion]:
        """One completion per request, in order. Raises EngineError, WorkerDied."""
        for worker in self.workers:
            if worker.name not in self.capacity:
                self.capacity[worker.name] = await worker.call("capacity")
        if all(self.capacity[worker.name] is not None for worker in self.workers):
            return await self._one_by_one(requests)
        return await self._in_shares(requests)

    async def sync(self, method: WeightSync, actor: WorkerHandle, version: int) -> SyncReport:
        """Give every worker the actor's weights as `version`. A worker that fails to take them is replaced by one that
        has them. Raises SyncError when that fails too, or when there is no way to replace it."""
        report = await method.update(actor, self.workers, version)
        for name, reason in report.failed.items():
            await self._replace(name, reason, method, actor)
        return report

    async def _replace(self, name: str, reason: str, method: WeightSync, actor: WorkerHandle) -> None:
        index = next(i for i, worker in enumerate(self.workers) if worker.name == name)
        if self.spawn is None:
            raise SyncError(f"{name}: {reason}")
        self.note(f"{name} is replaced: {reason}")
        await self.workers[index].kill()
        method.forget(name)
        self.capacity.pop(name, None)
        self.workers[index] = await self.spawn(index)
        await method.catch_up(actor, self.workers[index])

    async def _in_shares(self, requests: list[GenerateRequest]) -> list[Completion]:
        shares = _share_out(requests, len(self.workers))
        busy = [(worker, share) for worker, share in zip(self.workers, shares, strict=True) if share]
        answers = await asyncio.gather(*(w.call("generate", [requests[i] for i in share]) for w, share in busy))
        completions: dict[int, Completion] = {}
        for (_, share), answer in zip(busy, answers, strict=True):
            completions.update(zip(share, answer, strict=True))
        return [completions[i] for i in range(len(requests))]

    async def _one_by_one(self, requests: list[GenerateRequest]) -> list[Completion]:
        waiting = deque(range(len(requests)))
        running: dict[asyncio.Task[list[Completion]], tuple[int, WorkerHandle]] = {}
        load = {worker.name: 0 for worker in self.workers}
        usable = list(self.workers)
        seen: dict[tuple[int, ...], str] = {}
        completions: dict[int, Completion] = {}
        try:
            while waiting or running:
                while waiting and (worker := self._pick(usable, load, seen.get(requests[waiting[0]].prompt_ids))):
                    position = waiting.popleft()
                    seen[requests[position].prompt_ids] = worker.name
                    load[worker.name] += 1
                    task = asyncio.create_task(worker.call("generate", [requests[position]]))
                    running[task] = (position, worker)
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    position, worker = running.pop(task)
                    load[worker.name] -= 1
                    try:
                        completions[position] = task.result()[0]
                    except (EngineDied, WorkerDied) as error:
                        usable = [other for other in usable if other is not worker]
                        if not usable:
                            raise
                        self.note(f"{worker.name} is gone, its requests run again on others: {error}")
                        waiting.appendleft(position)
        finally:
            for task in running:
                task.cancel()
        return [completions[i] for i in range(len(requests))]

    def _pick(self, usable: list[WorkerHandle], load: dict[str, int], before: str | None) -> WorkerHandle | None:
        """The idlest worker with room; the one that had the same prompt before, unless it is well ahead."""
        free = [worker for worker in usable if load[worker.name] < (self.capacity[worker.name] or 1)]
        if not free:
            return None
        idlest = min(free, key=lambda worker: load[worker.name])
        known = next((worker for worker in free if worker.name == before), idlest)
        return known if load[known.name] <= load[idlest.name] + _AFFINITY else idlest


def _share_out(requests: list[GenerateRequest], workers: int) -> list[list[int]]:
    """Positions of the requests each worker gets: equal prompts stay together, the most work goes out first."""
    by_prompt: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for position, request in enumerate(requests):
        by_prompt[request.prompt_ids].append(position)
    shares: list[list[int]] = [[] for _ in range(workers)]
    load = [0] * workers
    for positions in sorted(by_prompt.values(), key=len, reverse=True):
        lightest = load.index(min(load))
        shares[lightest] += positions
        load[lightest] += sum(requests[p].sampling.max_tokens for p in positions)
    return shares
