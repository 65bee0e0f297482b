"""What a run is doing: one set of facts, for the run's record, where another process reads it, and for the display.

The loop says what stage it is in. What changes within a stage (groups, tokens, attempts, workers) is looked at twice a
second, in the event loop, while the work goes on elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mrl.backends import WorkerHandle
from mrl.store.progress import Progress, WorkerHealth
from mrl.store.run import RunStore
from mrl.tracking import TrackerSet

EVERY_SECONDS = 0.5

LEAST_SILENCE_SECONDS = 60.0
"""A rollout worker that leaves a question unanswered for so long may still be busy, whatever limit is set."""

Handles = Callable[[], Sequence[WorkerHandle]]
"""The workers there are now: one that was replaced is another object of the same name."""


class RunProgress:
    """The facts of one run, passed on to the trackers that show them and, once it is open, to the store."""

    def __init__(self, trackers: TrackerSet) -> None:
        self.facts = Progress()
        self.trackers = trackers
        self.store: RunStore | None = None
        self.workers = WorkerWatch()
        self._detail = ""

    def record(self, store: RunStore, step: int) -> None:
        """From now on in the store, too. step: the last one that is done."""
        self.store, self.facts.step = store, step
        store.report(self.facts)

    def begin(self, stage: str, step: int, groups_wanted: int) -> None:
        """A step, or an evaluation: groups and tokens count from 0."""
        self.facts.step, self.facts.groups_wanted = step, groups_wanted
        self.facts.groups_done = self.facts.tokens = 0
        self.stage(stage)

    def stage(self, name: str, detail: str = "") -> None:
        """What the run does from now on. detail: for the display, in the place of counts."""
        if name != self.facts.stage:
            self.facts.stage, self.facts.since = name, time.time()
        self._detail = detail
        self.tell()

    def tell(self) -> None:
        """Pass the changed facts on."""
        self.trackers.phase(self.facts.stage, self._detail or shown_counts(self.facts))
        if self.store is not None:
            self.store.report(self.facts)

    @contextlib.asynccontextmanager
    async def watching(
        self,
        look: Callable[[], None],
        rollout: Handles,
        others: Handles,
        *,
        silence: float = float("inf"),
        note: Callable[[str], None] = lambda message: None,
    ) -> AsyncIterator[None]:
        """Within it, `look` brings the facts up to date twice a second, and the workers are asked how they are: those
        that generate (`rollout`), and those that serve no policy. One that generates and says nothing for `silence`
        seconds is ended, and `note` told: its requests then run elsewhere."""
        self.workers.silence, self.workers.note = max(silence, LEAST_SILENCE_SECONDS), note
        watching = asyncio.create_task(self._watch(look, rollout, others))
        try:
            yield
        finally:
            watching.cancel()
            self.workers.close()
            # An error while watching is no reason to lose a run.
            await asyncio.gather(watching, return_exceptions=True)

    async def _watch(self, look: Callable[[], None], rollout: Handles, others: Handles) -> None:
        while True:
            self.facts.tokens += self.workers.look(rollout(), others())
            self.facts.workers = self.workers.health()
            look()
            self.tell()
            await asyncio.sleep(EVERY_SECONDS)


def shown_counts(facts: Progress) -> str:
    """Groups and tokens so far, in stages that have any: `3/8 groups, 12,345 tokens`."""
    if facts.stage not in ("generating", "evaluating"):
        return ""
    groups = f"{facts.groups_done}/{facts.groups_wanted} groups" if facts.groups_done else ""
    tokens = f"{facts.tokens:,} tokens" if facts.tokens else ""
    return ", ".join(part for part in (groups, tokens) if part)


@dataclass
class _Place:
    """The worker in one place, which may be replaced by another."""

    handle: WorkerHandle
    health: WorkerHealth
    sampled: int | None = None
    """Tokens its engine had sampled in all when it last answered."""
    asking: asyncio.Task[None] | None = None
    unanswered: int = 0
    """Looks since it was asked. Not seconds: if this process was stopped meanwhile, that is not the worker's fault."""


class WorkerWatch:
    """Asks rollout workers for the version they serve and the tokens they have sampled, and others whether they are
    alive. One question to each at a time: a worker that does not answer is not asked again, nor waited for.

    A process that was stopped, or a machine that hangs, keeps its connection, and calls may take `call_timeout`; but a
    worker answers this question whatever else it does. silence: seconds after which one that does not is ended. note:
    told of it.
    """

    def __init__(self) -> None:
        self.silence = float("inf")
        self.note: Callable[[str], None] = lambda message: None
        self._places: dict[str, _Place] = {}
        self._sampled = 0

    def look(self, rollout: Sequence[WorkerHandle], others: Sequence[WorkerHandle]) -> int:
        """Ask everybody who has answered. Returns the tokens sampled since the last look, as far as they are known."""
        for handle in rollout:
            self._ask(handle, "progress")
        for handle in others:
            self._ask(handle, None)
        sampled, self._sampled = self._sampled, 0
        return sampled

    def health(self) -> list[WorkerHealth]:
        """The health of every worker when it last answered."""
        return [place.health for place in self._places.values()]

    def close(self) -> None:
        """Stop waiting for answers."""
        for place in self._places.values():
            if place.asking is not None:
                place.asking.cancel()

    def _ask(self, handle: WorkerHandle, method: str | None) -> None:
        place = self._places.setdefault(handle.name, _Place(handle, WorkerHealth(handle.name)))
        if place.handle is not handle:
            self._places[handle.name] = place = _Place(handle, place.health, sampled=0)
            place.health.restarts += 1
        if place.asking is None or place.asking.done():
            place.unanswered = 0
            place.asking = asyncio.create_task(self._answer(place, method))
            return
        place.unanswered += 1
        if method is not None and place.health.alive and place.unanswered * EVERY_SECONDS >= self.silence:
            place.health.alive = False
            place.asking.cancel()
            place.asking = asyncio.create_task(self._end(place))

    async def _end(self, place: _Place) -> None:
        """Whoever waits for it is told that it is gone, and replaces it."""
        self.note(f"{place.handle.name} has not said anything for {self.silence:.0f} s and is ended")
        await place.handle.kill()

    async def _answer(self, place: _Place, method: str | None) -> None:
        try:
            if method is None:
                place.health.alive = await place.handle.alive()
                return
            answer: dict[str, Any] = await place.handle.call(method)
        except Exception:  # it is gone or being replaced: whoever works with it handles that
            place.health.alive = False
            return
        place.health.alive, place.health.version = True, answer["version"]
        sampled: int | None = answer["sampled_tokens"]
        if sampled is not None:
            self._sampled += sampled - (sampled if place.sampled is None else place.sampled)
            place.sampled = sampled
