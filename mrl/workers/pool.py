"""The policy as rollout sources see it: one client, over any number of workers, which may die and be replaced."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Hashable, Iterator
from typing import TYPE_CHECKING

from mrl.backends.base import WorkerHandle
from mrl.errors import EngineDied, EngineError, SyncError, WorkerDied
from mrl.system.gather import all_of
from mrl.types import Completion, GenerateRequest, SamplingParams, TokenSequence
from mrl.workers.rollout import CallBatch

if TYPE_CHECKING:
    from mrl.sync.base import SyncReport, WeightSync

_AFFINITY = 8
"""How many more requests than the idlest worker one may have and still get another whose prefix it has cached."""

_PREFIXES_KNOWN = 8192
"""Prompts and sessions for which the pool remembers which worker has them cached."""

Spawn = Callable[[int], Awaitable[WorkerHandle]]


class RolloutPool:
    """A PolicyClient (mrl.rollouts.base) over live rollout workers: requests one by one, to the idlest worker.

    A request goes where the prefix it begins with is cached: a session's to the worker that has the session, equal
    prompts to the same worker, unless that one is well ahead of the idlest. Workers say how many requests they take at
    a time (`capacity`); further requests wait here, so that a long completion holds up nobody. Workers that take any
    number queue requests themselves; requests made at the same time are then spread the same way in every run.

    A worker that dies, or cannot take new weights, is replaced by a new one with the weights published last, and its
    requests are retried. max_model_len: tokens of prompt and completion together. spawn: makes a new worker for a
    place; without it nothing is replaced. note: told of each replacement. max_restarts: replacements allowed in
    all.
    """

    def __init__(
        self,
        workers: list[WorkerHandle],
        max_model_len: int,
        *,
        spawn: Spawn | None = None,
        note: Callable[[str], None] | None = None,
        max_restarts: int = 10,
    ) -> None:
        self.max_model_len = max_model_len
        self.version = 0
        """Of the weights that all workers have."""
        self.workers = workers
        self.spawn, self.note = spawn, note or (lambda message: None)
        self.restarts, self.max_restarts = 0, max_restarts
        self.capacity: dict[str, int | None] = {}
        self.load = [0] * len(workers)
        """Requests each place works on."""
        self.busy = 0
        """Their sum."""
        self.prompt_tokens = self.prefilled_tokens = 0
        """Of completions that say how much was prefilled for them: all tokens of their prompts, and those."""
        self.by_load = [(0, place) for place in range(len(workers))]
        """A heap of (load, place), the idlest first. Entries stay when they are no longer true, and those of places
        without room leave it: whatever changes a place's load or room adds one."""
        self.down: set[int] = set()
        """Places whose worker is being replaced."""
        self.dead: dict[int, str] = {}
        """Why, of those whose worker has died and whose replacement has not begun."""
        self.waiting: deque[asyncio.Future[None]] = deque()
        """For a worker with room, first come first served."""
        self.known: OrderedDict[Hashable, int] = OrderedDict()
        """Where a session, or a prompt, was sent last. Forgotten with new weights, which make prefixes worthless, and
        when nobody works: who decodes with whom decides the last bits, and a resumed run knows no earlier steps."""
        self.forming: dict[int, list[asyncio.Future[CallBatch]]] = {}
        """Requests of this turn of the event loop, by place."""
        self.batch_numbers = itertools.count()
        self.updating = asyncio.Lock()
        self.last_sync: tuple[WeightSync, WorkerHandle] | None = None
        """The sync method and the actor that a replacement gets its weights from."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion. A request that cannot be served ends with the reason "error".

        Raises EngineDied, WorkerDied and SyncError when workers are gone and cannot be replaced.
        """
        before: int | None = None
        while True:
            place = before = await self._acquire_place(request, before)
            worker = self.workers[place]
            try:
                call_batch = await self._join_batch(place) if self.capacity.get(worker.name, 1) is None else None
                completions: list[Completion] = await worker.call("generate", [request], call_batch)
                self._count(request, completions[0])
                return completions[0]
            except (EngineDied, WorkerDied) as error:
                await self._replace_dead(place, worker, error)
            except EngineError as error:
                return Completion.failed(request, str(error), version=-1)
            finally:
                self._let_go(place)

    async def logprobs(self, sequences: list[TokenSequence]) -> list[list[float]]:
        """Of each completion's tokens, at the sequences' temperature, which is the same for all. Raises EngineError
        where the engine cannot say them, and as `generate` where nobody is left."""
        asked = GenerateRequest("logprobs", sequences[0].prompt_ids, SamplingParams(), seed=0)
        prompts, completions = [one.prompt_ids for one in sequences], [one.completion_ids for one in sequences]
        while True:
            place = await self._acquire_place(asked)
            worker = self.workers[place]
            try:
                scored: list[list[float]] = await worker.call(
                    "compute_logprobs", prompts, completions, sequences[0].temperature
                )
                return scored
            except (EngineDied, WorkerDied) as error:
                await self._replace_dead(place, worker, error)
            finally:
                self._let_go(place)

    async def ask_capacity(self) -> None:
        """Ask new workers how many requests they take. Called before the first requests, so that those are sent at once
        and in order."""
        new = [worker for worker in self.workers if worker.name not in self.capacity]
        answers = await all_of([worker.call("capacity") for worker in new])
        self.capacity |= {worker.name: answer for worker, answer in zip(new, answers, strict=True)}
        self._sort_places()

    async def sync(self, method: WeightSync, actor: WorkerHandle, version: int) -> SyncReport:
        """Give every worker the actor's weights as `version`. A worker that fails to take them is replaced by one that
        has them. Raises SyncError when that fails too, or when there is no way to replace it."""
        async with self.updating:
            report = await method.update(actor, self.workers, version)
            for name, reason in report.failed.items():
                if self.spawn is None or self.last_sync is None:  # one that never worked will not work again
                    raise SyncError(f"{name}: {reason}")
            places = {worker.name: place for place, worker in enumerate(self.workers)}
            await self._replace_all({places[name]: reason for name, reason in report.failed.items()})
            self.last_sync = method, actor
            self.version = version
            self.known.clear()
        return report

    def prefill_metrics(self) -> dict[str, float]:
        """What was prefilled since this was last asked; empty where no engine said."""
        if not self.prompt_tokens:
            return {}
        saved = 1 - self.prefilled_tokens / self.prompt_tokens
        metrics = {"rollout/prefill_tokens": float(self.prefilled_tokens), "rollout/prefill_saved_fraction": saved}
        self.prompt_tokens = self.prefilled_tokens = 0
        return metrics

    @contextlib.contextmanager
    def not_counted(self) -> Iterator[None]:
        """What is prefilled meanwhile, for an evaluation, is no part of `prefill_metrics`."""
        before = self.prompt_tokens, self.prefilled_tokens
        try:
            yield
        finally:
            self.prompt_tokens, self.prefilled_tokens = before

    def _count(self, request: GenerateRequest, completion: Completion) -> None:
        if completion.prefilled is not None:
            self.prompt_tokens += len(request.prompt_ids)
            self.prefilled_tokens += completion.prefilled

    # --- who gets a request -----------------------------------------------------------------------------------------

    async def _acquire_place(self, request: GenerateRequest, before: int | None = None) -> int:
        """A place for one more request, counted as taken."""
        place = None if self.waiting else self._pick(request, before)
        while place is None:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                self._wake()  # the turn may have been given already
                raise
            place = self._pick(request, before)
        self._change_load(place, 1)
        for key in _prefixes(request):
            self.known[key] = place
            self.known.move_to_end(key)
        while len(self.known) > _PREFIXES_KNOWN:
            self.known.popitem(last=False)
        self._wake()
        return place

    def _pick(self, request: GenerateRequest, before: int | None) -> int | None:
        """The worker that has its prefix, if it has room and is not well ahead; else the idlest one with room. before:
        of a request that is asked again; it and those beside it go where they were, to decode together again."""
        idlest = self._idlest()
        if idlest is None:
            return None
        if not self.busy and request.session not in self.known:
            self.known.clear()
        known = next((self.known[key] for key in _prefixes(request) if key in self.known), idlest)
        known = known if before is None else before
        return known if self._has_room(known) and self.load[known] <= self.load[idlest] + _AFFINITY else idlest

    def _idlest(self) -> int | None:
        """The place with room whose worker has the fewest requests, of several the first."""
        while self.by_load:
            load, place = self.by_load[0]
            if load == self.load[place] and self._has_room(place):
                return place
            heapq.heappop(self.by_load)
        return None

    def _change_load(self, place: int, by: int) -> None:
        self.load[place] += by
        self.busy += by
        if len(self.by_load) > 8 * len(self.workers):
            self._sort_places()  # most of it is no longer true
        else:
            heapq.heappush(self.by_load, (self.load[place], place))

    def _sort_places(self) -> None:
        self.by_load = [(load, place) for place, load in enumerate(self.load)]
        heapq.heapify(self.by_load)

    def _let_go(self, place: int) -> None:
        """A request is done."""
        self._change_load(place, -1)
        self._wake()

    def _has_room(self, place: int) -> bool:
        if place in self.down:
            return False
        capacity = self.capacity.get(self.workers[place].name, 1)  # 1 = it was not asked yet
        return capacity is None or self.load[place] < capacity

    async def _join_batch(self, place: int) -> CallBatch:
        """Wait for the other requests to this worker in this turn of the event loop: which ones decode in one batch
        decides the last bits of their logprobs."""
        waiting = self.forming.setdefault(place, [])
        if not waiting:
            asyncio.get_running_loop().call_soon(self._send_batch, place)
        waiting.append(asyncio.get_running_loop().create_future())
        return await waiting[-1]

    def _send_batch(self, place: int) -> None:
        waiting = [turn for turn in self.forming.pop(place) if not turn.done()]
        call_batch = CallBatch(next(self.batch_numbers), len(waiting))
        for turn in waiting:
            turn.set_result(call_batch)

    def _wake(self) -> None:
        """Let the first waiting request try again."""
        while self.waiting:
            turn = self.waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return

    # --- workers that fail ------------------------------------------------------------------------------------------

    async def _replace_dead(self, place: int, worker: WorkerHandle, error: EngineError | WorkerDied) -> None:
        """Replace a dead worker once, however many of its requests failed."""
        if self.workers[place] is worker:
            self.down.add(place)
            self.dead.setdefault(place, str(error))
        async with self.updating:
            if self.workers[place] is not worker:
                return
            if self.spawn is not None and self.last_sync is not None:
                await self._replace_all({place: str(error), **self.dead})
            elif len(self.down) == len(self.workers):
                raise error
            else:
                self.note(f"{worker.name} is gone, its requests run again on others: {error}")

    async def _replace_all(self, reasons: dict[int, str]) -> None:
        """At the same time: where a new worker is a rented machine, each takes minutes. reasons: by place."""
        await all_of([self._replace(place, reason) for place, reason in reasons.items()])

    async def _replace(self, place: int, reason: str) -> None:
        """Raises SyncError and EngineDied when the new one fails as well, or when there were too many."""
        assert self.spawn is not None
        assert self.last_sync is not None
        old = self.workers[place]
        self.down.add(place)
        self.restarts += 1
        if self.restarts > self.max_restarts:
            raise EngineDied(
                f"{old.name} failed, the {self.restarts}th of this run (max_worker_restarts: {self.max_restarts}): "
                f"{reason}"
            )
        self.note(f"{old.name} is replaced: {reason}")
        method, actor = self.last_sync
        await old.kill()
        method.forget(old.name)
        self.capacity.pop(old.name, None)
        new = self.workers[place] = await self.spawn(place)
        self.dead.pop(place, None)  # only now: until then requests of the old one fail, as it is ended
        await method.catch_up(actor, new)
        self.capacity[new.name] = await new.call("capacity")
        self.down.discard(place)
        self._sort_places()
        self._wake()


def _prefixes(request: GenerateRequest) -> list[Hashable]:
    """What its cached prefix may be found by, the surest first."""
    images = tuple(image.sha256 for image in request.media)
    return [*([request.session] if request.session is not None else []), (request.prompt_ids, images)]
