"""`direct`: memory to memory. In one process workers use the actor's module itself; otherwise its weights are copied
into shared memory, where each worker reads them."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from mrl.backends.base import WorkerHandle
from mrl.errors import SyncError
from mrl.sync.base import WeightSync
from mrl.types import WeightRef

SHARED_MEMORY = Path("/dev/shm")


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
            shutil.rmtree(self.memory, ignore_errors=True)
            self.memory = None


def shared_folder() -> Path:
    """A new folder in shared memory. What processes that are gone have left there is removed first."""
    if not os.access(SHARED_MEMORY, os.W_OK):
        raise SyncError(f"weight_sync_method: direct needs {SHARED_MEMORY} between processes; use reload")
    for old in SHARED_MEMORY.glob("mrl-*-*"):
        owner = old.name.split("-")[1]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists() and old.stat().st_uid == os.getuid():
            shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"mrl-{os.getpid()}-", dir=SHARED_MEMORY))
