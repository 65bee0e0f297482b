"""`direct`: memory to memory. In one process workers use the actor's module itself; otherwise its weights are copied
into shared memory, where each worker reads them."""

from __future__ import annotations

import os
from pathlib import Path

from mrl import scratch
from mrl.backends.base import WorkerHandle
from mrl.errors import SyncError
from mrl.sync.base import WeightSync
from mrl.types import WeightRef


class DirectSync(WeightSync):
    """Only where actor and workers share a machine."""

    memory: Path | None = None

    async def publish(self, actor: WorkerHandle, workers: list[WorkerHandle], version: int) -> WeightRef:
        abilities = [self.abilities[worker.name] for worker in workers]
        if self.shares_modules and all("module" in a["accepts"] for a in abilities):
            module: WeightRef = await actor.call("share_module", version)
            return module
        if len({a["host"] for a in abilities}) > 1:
            raise SyncError("weight_sync_method: direct needs all workers on one machine; use volume")
        if self.memory is None:
            self.memory = shared_folder()
        ref: WeightRef = await actor.call(
            "write_weights", str(self.memory), version, how="in_memory", **self.what(workers)
        )
        return ref

    def close(self) -> None:
        if self.memory is not None:
            scratch.remove(self.memory)
            self.memory = None


def shared_folder() -> Path:
    """A new folder in shared memory; those of processes that are gone are removed first. Raises SyncError."""
    if not os.access(scratch.SHARED_MEMORY, os.W_OK):
        raise SyncError(f"weight_sync_method: direct needs {scratch.SHARED_MEMORY} between processes; use reload")
    return scratch.make("shared", scratch.SHARED_MEMORY)
