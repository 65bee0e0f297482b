"""The policy as rollout sources see it: one `generate`, however many workers are behind it, whichever of them die."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, defaultdict, deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from mrl.backends.base import WorkerHandle
from mrl.errors import EngineDied, EngineError, SyncError, WorkerDied
from mrl.types import Completion, GenerateRequest

if TYPE_CHECKING:
    from mrl.sync.base import SyncReport, WeightSync

T = TypeVar("T")

_AFFINITY = 8
"""Requests that a worker may be ahead of the idlest one and still get another of a prompt it has seen."""

_PROMPTS_KNOWN = 4096
"""Prompts of which it is remembered which worker has them in its cache."""

Spawn = Callable[[int], Awaitable[WorkerHandle]]


class PolicyClient:
    """Spreads requests over rollout workers and puts the completions back in order.

    Workers with continuous batching (see `capacity` of the worker) get one request at a time, the idlest first, so that
    a long completion holds up nobody; several calls may be under way. Workers that decode a batch at a time get fixed
    shares, which keeps their batches, and so the last bits of their numbers, the same from run to run.

    A worker that dies, or cannot take new weights, is replaced by a new one with the weights published last, and what
    it was asked runs again. spawn: makes a new worker for a place; without it nothing is replaced. note: told of each
    that was. max_restarts: workers that may be replaced in all.
    """

    def __init__(
        self,
        workers: list[WorkerHandle],
        spawn: Spawn | None = None,
        note: Callable[[str], None] | None = None,
        max_restarts: int = 10,
    ) -> None:
        self.workers = workers
        self.spawn, self.note = spawn, note or (lambda message: None)
        self.restarts, self.max_restarts = 0, max_restarts
        self.capacity: dict[str, int | None] = {}
        self.load = [0] * len(workers)
        """Requests each place works on."""
        self.down: set[int] = set()
        """Places whose worker is being replaced."""
        self.waiting: deque[asyncio.Future[None]] = deque()
        """For a worker with room, first come first served."""
        self.prompts: OrderedDict[tuple[int, ...], int] = OrderedDict()
        self.updating = asyncio.Lock()
        self.last_sync: tuple[WeightSync, WorkerHandle] | None = None
        """What a new worker gets its weights with, and from whom."""

    async def generate(self, requests: list[GenerateRequest]) -> list[Completion]:
        """One completion per request, in order. Raises EngineError, WorkerDied."""
        await self.meet()
        if all(self.capacity[worker.name] is not None for worker in self.workers):
            return await _all([self._one(request) for request in requests])
        return await self._in_shares(requests)

    async def meet(self) -> None:
        """Ask workers that are new how they want their work. Done here, the first calls go out in their order."""
        for worker in self.workers:
            await self._meet(worker)

    async def sync(self, method: WeightSync, actor: WorkerHandle, version: int) -> SyncReport:
        """Give every worker the actor's weights as `version`. A worker that fails to take them is replaced by one that
        has them. Raises SyncError when that fails too, or when there is no way to replace it."""
        async with self.updating:
            report = await method.update(actor, self.workers, version)
            for name, reason in report.failed.items():
                if self.spawn is None or self.last_sync is None:  # one that never worked will not work again
                    raise SyncError(f"{name}: {reason}")
                place = next(i for i, worker in enumerate(self.workers) if worker.name == name)
                await self._replace(place, reason)
            self.last_sync = method, actor
        return report

    # --- requests one by one ----------------------------------------------------------------------------------------

    async def _one(self, request: GenerateRequest) -> Completion:
        while True:
            place = await self._room(request.prompt_ids)
            worker = self.workers[place]
            try:
                completions: list[Completion] = await worker.call("generate", [request])
                return completions[0]
            except (EngineDied, WorkerDied) as error:
                await self._died(place, worker, error)
            finally:
                self.load[place] -= 1
                self._wake()

    async def _room(self, prompt: tuple[int, ...]) -> int:
        """A place for one more request, counted as taken."""
        place = None if self.waiting else self._pick(prompt)
        while place is None:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                self._wake()  # the turn may have been given already
                raise
            place = self._pick(prompt)
        self.load[place] += 1
        self.prompts[prompt] = place
        self.prompts.move_to_end(prompt)
        if len(self.prompts) > _PROMPTS_KNOWN:
            self.prompts.popitem(last=False)
        self._wake()
        return place

    def _pick(self, prompt: tuple[int, ...]) -> int | None:
        """The idlest worker with room; the one that had the same prompt before, unless it is well ahead."""
        free = [
            place
            for place, worker in enumerate(self.workers)
            if place not in self.down and self.load[place] < (self.capacity.get(worker.name) or 1)
        ]
        if not free:
            return None
        idlest = min(free, key=lambda place: self.load[place])
        known = self.prompts.get(prompt, idlest)
        return known if known in free and self.load[known] <= self.load[idlest] + _AFFINITY else idlest

    def _wake(self) -> None:
        """Let the first who waits look again."""
        while self.waiting:
            turn = self.waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return

    # --- requests in shares -----------------------------------------------------------------------------------------

    async def _in_shares(self, requests: list[GenerateRequest]) -> list[Completion]:
        shares = _share_out(requests, len(self.workers))
        busy = [(place, share) for place, share in enumerate(shares) if share]
        answers = await _all([self._share(place, [requests[i] for i in share]) for place, share in busy])
        completions: dict[int, Completion] = {}
        for (_, share), answer in zip(busy, answers, strict=True):
            completions.update(zip(share, answer, strict=True))
        return [completions[i] for i in range(len(requests))]

    async def _share(self, place: int, requests: list[GenerateRequest]) -> list[Completion]:
        while True:
            worker = self.workers[place]
            try:
                completions: list[Completion] = await worker.call("generate", requests)
                return completions
            except (EngineDied, WorkerDied) as error:
                await self._died(place, worker, error)
                if self.workers[place] is worker:
                    raise

    # --- workers that fail ------------------------------------------------------------------------------------------

    async def _meet(self, worker: WorkerHandle) -> None:
        if worker.name not in self.capacity:
            self.capacity[worker.name] = await worker.call("capacity")

    async def _died(self, place: int, worker: WorkerHandle, error: EngineError | WorkerDied) -> None:
        """Have the worker replaced, once, however many requests of it failed."""
        if self.workers[place] is worker:
            self.down.add(place)
        async with self.updating:
            if self.workers[place] is not worker:
                return
            if self.spawn is not None and self.last_sync is not None:
                await self._replace(place, str(error))
            elif len(self.down) == len(self.workers):
                raise error
            else:
                self.note(f"{worker.name} is gone, its requests run again on others: {error}")

    async def _replace(self, place: int, reason: str) -> None:
        """Raises SyncError, EngineError when the new one fails as well."""
        assert self.spawn is not None
        assert self.last_sync is not None
        old = self.workers[place]
        self.down.add(place)
        self.restarts += 1
        if self.restarts > self.max_restarts:
            raise EngineError(
                f"{old.name} failed, the {self.restarts}th of this run (max_worker_restarts: {self.max_restarts}): "
                f"{reason}"
            )
        self.note(f"{old.name} is replaced: {reason}")
        method, actor = self.last_sync
        await old.kill()
        method.forget(old.name)
        self.capacity.pop(old.name, None)
        self.workers[place] = await self.spawn(place)
        await method.catch_up(actor, self.workers[place])
        await self._meet(self.workers[place])
        self.down.discard(place)
        self._wake()


async def _all(work: list[Coroutine[Any, Any, T]]) -> list[T]:
    """Every result, in order; when one fails, the others are cancelled."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


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
