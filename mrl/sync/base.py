"""What a sync method is: it makes every rollout worker serve the actor's weights, or says which ones do not.

One protocol for all methods: the actor publishes version v, every worker is told where to find it, and each answers
with the version and the checksum of what it then holds. A publish is complete when all have confirmed. A worker that
refuses, answers something else, or misses the deadline has failed and must get no work before it holds the current
version.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

from mrl.backends.base import WorkerHandle
from mrl.errors import MRLError, SyncError
from mrl.types import WeightRef

T = TypeVar("T")


@dataclass
class SyncReport:
    """How one publish went."""

    version: int
    bytes: int
    """Written by the actor."""
    publish_seconds: float
    load_seconds: float
    """Until the last worker had answered."""
    failed: dict[str, str] = field(default_factory=dict)
    """Reason by worker name: these workers do not hold the version."""


class WeightSync(ABC):
    """Implemented by one file per method in this package.

    folder: a directory of its own, for methods that pass weights through files. deadline: seconds for publishing, and
    for loading. lora: the policy is an adapter; `adapter` sends the adapter alone to workers that accept it, `merged`
    sends all weights with the adapter merged in. shares_modules: actor and workers live in one process.
    """

    def __init__(
        self,
        folder: Path,
        *,
        deadline: float = 300.0,
        lora: str | None = None,
        shares_modules: bool = True,
    ) -> None:
        self.folder, self.deadline = folder, deadline
        self.lora, self.shares_modules = lora, shares_modules
        self.current: WeightRef | None = None
        self.on_published: Callable[[], Awaitable[None]] | None = None
        """Called once weights are published and before any worker loads them."""
        self.capabilities: dict[str, dict[str, Any]] = {}

    async def sync(self, actor: WorkerHandle, workers: list[WorkerHandle], version: int) -> SyncReport:
        """Publish the actor's weights as `version`; returns once every worker serves them, else raises SyncError."""
        report = await self.update(actor, workers, version)
        if report.failed:
            raise SyncError("; ".join(f"{name}: {reason}" for name, reason in report.failed.items()))
        return report

    async def update(self, actor: WorkerHandle, workers: list[WorkerHandle], version: int) -> SyncReport:
        """Like `sync`, but failed workers are in the report. Raises SyncError when nothing could be published."""
        start = perf_counter()
        failed = await self._ask_new_workers(workers)
        able = [worker for worker in workers if worker.name not in failed]
        self.current = await self._in_time(self.publish(actor, able, version), f"publishing version {version}")
        if self.on_published is not None:
            await self.on_published()
        published = perf_counter()
        outcomes = await asyncio.gather(*(self._load_on(worker) for worker in able))
        failed |= {worker.name: reason for worker, reason in zip(able, outcomes, strict=True) if reason is not None}
        return SyncReport(
            version, self.current.bytes, published - start, perf_counter() - published, dict(sorted(failed.items()))
        )

    async def catch_up(self, actor: WorkerHandle, worker: WorkerHandle) -> None:
        """Bring a new worker to the version that was published last. Raises SyncError."""
        assert self.current is not None, "nothing was published yet"
        failed = await self._ask_new_workers([worker])
        reason = failed.get(worker.name) or await self._load_on(worker)
        if reason is not None:
            raise SyncError(f"{worker.name}: {reason}")

    def forget(self, name: str) -> None:
        """The worker called `name` is gone; another one may take its name."""
        self.capabilities.pop(name, None)

    @abstractmethod
    async def publish(self, actor: WorkerHandle, workers: list[WorkerHandle], version: int) -> WeightRef:
        """Have the actor write its weights where these workers find them. Raises SyncError."""

    async def load(self, worker: WorkerHandle, ref: WeightRef) -> dict[str, Any]:
        """Have one worker load them. Returns its answer: the version and the checksum of what it holds."""
        answer: dict[str, Any] = await worker.call("update_weights", ref)
        return answer

    def served(self) -> Path | None:
        """A file with the weights the workers serve, where the method keeps one."""
        return None

    def close(self) -> None:
        """Remove what was written."""
        return

    # --- for the methods --------------------------------------------------------------------------------------------

    def publish_options(self, workers: list[WorkerHandle]) -> dict[str, Any]:
        """What the actor has to write for all of these workers: the adapter or everything, and in which dtype."""
        capabilities = [self.capabilities[worker.name] for worker in workers]
        adapter = self.lora == "adapter" and bool(capabilities) and all("adapter" in a["accepts"] for a in capabilities)
        dtypes = {a["dtype"] for a in capabilities}
        return {"adapter": adapter, "dtype": dtypes.pop() if len(dtypes) == 1 else None}

    # --- inner ------------------------------------------------------------------------------------------------------

    async def _ask_new_workers(self, workers: list[WorkerHandle]) -> dict[str, str]:
        """Ask new workers which kinds of weights they accept. Returns those that do not answer, and why."""
        new = [worker for worker in workers if worker.name not in self.capabilities]
        calls = (worker.call("initialize_for_weight_sync") for worker in new)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        failed = {}
        for worker, answer in zip(new, answers, strict=True):
            if isinstance(answer, MRLError):
                failed[worker.name] = str(answer)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                self.capabilities[worker.name] = answer
        return failed

    async def _load_on(self, worker: WorkerHandle) -> str | None:
        """Load the current version on a worker. Returns why that failed; None when it did not."""
        assert self.current is not None
        try:
            what = f"loading version {self.current.version}"
            confirm(self.current, await self._in_time(self.load(worker, self.current), what))
        except MRLError as error:
            return str(error)
        return None

    async def _in_time(self, work: Coroutine[Any, Any, T], what: str) -> T:
        deadline = asyncio.timeout(self.deadline)
        try:
            async with deadline:
                return await work
        except TimeoutError:
            if not deadline.expired():
                raise
            raise SyncError(f"{what} did not end within {self.deadline:.0f} s; raise sync_timeout") from None


def confirm(ref: WeightRef, answer: dict[str, Any]) -> None:
    """Raise SyncError unless a worker's answer says that it holds exactly what was published."""
    if answer["version"] != ref.version:
        raise SyncError(f"serves version {answer['version']} after version {ref.version} was sent")
    if ref.checksum is not None and answer["checksum"] != ref.checksum:
        raise SyncError(
            f"the weights it holds are not those that were sent as version {ref.version} "
            f"(checksum {answer['checksum']}, expected {ref.checksum})"
        )
