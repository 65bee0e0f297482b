"""Attempts at tasks, whatever the source: together, within their deadlines, and a failed one is data.

    tasks × n  ->  attempt k of task t, seed (seed, t, k)  ->  a Rollout, also when it failed  ->  Groups, in order

An attempt that raises, or takes too long, is a failed rollout with the reason. Only what no attempt can do anything
about ends them all: rollout workers that are gone and cannot be replaced, weights that are not what they should be,
and options that do not work.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections import Counter
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any

from mrl.errors import ConfigError, EngineDied, SyncError, WorkerDied
from mrl.rollouts.base import BatchSource, PolicyClient, RolloutSource
from mrl.system.gather import all_of, is_being_cancelled
from mrl.types import Group, Rollout, Task, derive_seed

if TYPE_CHECKING:
    from mrl.backends import Backend

ENDS_ALL = (WorkerDied, EngineDied, SyncError, ConfigError)
"""Errors that are nobody's rollout's."""


async def start_source(source: Any, backend: Backend, note: Callable[[str], None]) -> None:
    """Let a source start what it needs, where it has to. Raises ConfigError for what cannot work."""
    if (start := getattr(source, "start", None)) is not None:
        await start(backend, note)


async def close_source(source: Any) -> list[str]:
    """Let it end what it has started. Returns what could not be closed, in sentences.

    It raises nothing, as a run may be ending with an error of its own.
    """
    close = getattr(source, "close", None)
    try:
        return [] if close is None else await close() or []
    except Exception as error:
        return [f"{type(source).__name__} could not be closed: {type(error).__name__}: {error}"]


class Runner:
    """Has a source attempt tasks.

    timeout: seconds one attempt may take; None = as long as it likes. at_once: attempts under way at a time; None = all
    that were asked for. With a limit, which requests are decoded side by side depends on time, and so may the last bits
    of what is sampled. `in_flight` and `ended` count attempts.
    """

    def __init__(
        self,
        source: RolloutSource | BatchSource,
        policy: PolicyClient,
        *,
        timeout: float | None = None,
        at_once: int | None = None,
    ) -> None:
        self.source, self.policy = source, policy
        # Asked once: a protocol's check looks at every member, and takes a tenth of a millisecond.
        self.batches = source if isinstance(source, BatchSource) else None
        self.attempts = source if self.batches is None and isinstance(source, RolloutSource) else None
        self.timeout = None if getattr(source, "keeps_time", False) else timeout
        self.places = None if at_once is None else asyncio.Semaphore(at_once)
        self.in_flight = self.ended = 0

    async def run(
        self,
        tasks: list[Task],
        n: int,
        *,
        seed: int,
        state: Any = None,
        finished: Callable[[Group], None] = lambda group: None,
    ) -> list[Group]:
        """Attempt every task `n` times; groups in the order of the tasks.

        state: what reward functions get as `trainer_state`, for sources that make all rollouts in one call.
        finished: called with each group as soon as its last attempt has ended. A task that is among them once more (a
        dataset smaller than a batch) gets other attempts, with other seeds. Cancelled, it ends when all attempts have.
        """
        if not tasks:
            return []
        if self.batches is not None:
            return await self._collect(self.batches, tasks, n, seed, state, finished)
        before: Counter[str] = Counter()
        parts, work = [], []
        for task in tasks:
            part = _GroupInProgress(task, range(before[task.id], before[task.id] + n), finished)
            before[task.id] += n
            parts.append(part)
            work += [self._attempt(part, attempt, derive_seed(seed, task.id, attempt)) for attempt in part.attempts]
        await all_of(work)
        return [part.group for part in parts]

    # --- inner ------------------------------------------------------------------------------------------------------

    async def _collect(
        self,
        source: BatchSource,
        tasks: list[Task],
        n: int,
        seed: int,
        state: Any,
        finished: Callable[[Group], None],
    ) -> list[Group]:
        start, wanted = perf_counter(), len(tasks) * n
        takes_state = "state" in inspect.signature(source.collect).parameters
        self.in_flight += wanted
        try:
            groups = await source.collect(tasks, self.policy, n, seed, **({"state": state} if takes_state else {}))
        finally:
            self.in_flight -= wanted
        self.ended += wanted
        for group in groups:
            for rollout in group.rollouts:
                rollout.seconds.setdefault("generate", perf_counter() - start)
            finished(group)
        return groups

    async def _attempt(self, part: _GroupInProgress, attempt: int, seed: int) -> None:
        async with self.places or contextlib.nullcontext():
            self.in_flight += 1
            try:
                rollout = await self._rollout(part.group.task, attempt, seed)
            finally:
                self.in_flight -= 1
        self.ended += 1
        part.add(attempt, rollout)

    async def _rollout(self, task: Task, attempt: int, seed: int) -> Rollout:
        assert self.attempts is not None
        start = perf_counter()
        deadline = asyncio.timeout(self.timeout)
        try:
            async with deadline:
                rollout = await self.attempts.run(task, attempt, self.policy, seed)
        except ENDS_ALL:
            raise
        except (Exception, asyncio.CancelledError) as error:
            reason = f"{type(error).__name__}: {error}".rstrip(": ")
            if isinstance(error, asyncio.CancelledError):
                if is_being_cancelled():
                    raise
                reason = "CancelledError: what it waited for was cancelled, and not by the run"
            if deadline.expired() and isinstance(error, TimeoutError):
                reason = f"took longer than {self.timeout:g} s (rollout_timeout)"
            rollout = failed_rollout(task, attempt, reason)
        rollout.seconds.setdefault("generate", perf_counter() - start)
        return rollout


class _GroupInProgress:
    """A task's attempts, until the last has ended."""

    def __init__(self, task: Task, attempts: range, finished: Callable[[Group], None]) -> None:
        self.group, self.attempts, self.finished = Group(task, []), attempts, finished
        self.rollouts: dict[int, Rollout] = {}

    def add(self, attempt: int, rollout: Rollout) -> None:
        self.rollouts[attempt] = rollout
        if len(self.rollouts) == len(self.attempts):
            self.group.rollouts += [self.rollouts[attempt] for attempt in self.attempts]
            self.finished(self.group)


def rollout_id(task: Task, attempt: int) -> str:
    """An attempt's name in the record, and that of its requests."""
    return f"{task.id}#{attempt}"


def failed_rollout(task: Task, attempt: int, reason: str) -> Rollout:
    """An attempt that came to nothing: kept and counted, without samples."""
    rollout = Rollout(rollout_id(task, attempt), task.id, attempt, messages=[], samples=[], prompt=task.prompt)
    rollout.fail(reason)
    return rollout
