"""`delta`: only what changed since the last version, for slow links; a full copy every few versions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mrl.backends.base import WorkerHandle
from mrl.sync.base import WeightSync
from mrl.sync.volume import WAIT
from mrl.system import scratch
from mrl.types import WeightRef
from mrl.weights.files import own


class DeltaSync(WeightSync):
    """over: where the difference goes: files (`reload`), a shared disk (`volume`), or shared memory (`direct`).

    full_every: versions between full copies; a worker that joins in between gets one at once.
    """

    def __init__(self, folder: Path, *, over: str = "reload", full_every: int = 20, **common: Any) -> None:
        super().__init__(folder, **common)
        self.over, self.full_every = over, full_every
        self.since_full: int | None = None

    async def publish(self, actor: WorkerHandle, workers: list[WorkerHandle], version: int) -> WeightRef:
        since, self.since_full = self.since_full, None  # should this fail, the next one is full
        full = since is None or since + 1 >= self.full_every
        dtypes = {self.capabilities[worker.name]["dtype"] for worker in workers}
        dtype = dtypes.pop() if len(dtypes) == 1 else None
        ref = await self._write(actor, "write_difference", version, full=full, dtype=dtype)
        self.since_full = 0 if since is None or ref.base is None else since + 1
        return ref

    async def catch_up(self, actor: WorkerHandle, worker: WorkerHandle) -> None:
        """A new worker has no base for a delta: it gets all weights as last published. The actor may be ahead."""
        assert self.current is not None, "nothing was published yet"
        self.current = await self._write(actor, "write_last_whole", self.current.version)
        await super().catch_up(actor, worker)

    def close(self) -> None:
        scratch.remove(self.folder)

    async def _write(self, actor: WorkerHandle, method: str, version: int, **options: Any) -> WeightRef:
        folder = None if self.over == "direct" else str(self.folder)
        if self.over == "reload":
            own(self.folder)
        ref: WeightRef = await actor.call(method, folder, version, durable=self.over == "volume", **options)
        if self.over == "volume":
            ref.pull_seconds = WAIT * self.deadline
        return ref
