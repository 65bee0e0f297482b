"""`reload`: the actor writes its weights to files, every worker loads them into the model it has."""

from __future__ import annotations

from pathlib import Path

from mrl.backends.base import WorkerHandle
from mrl.sync.base import WeightSync
from mrl.system import scratch
from mrl.types import WeightRef
from mrl.weights.files import own, versions


class ReloadSync(WeightSync):
    """Works between processes that see the same disk, which may be a memory-backed one."""

    async def publish(self, actor: WorkerHandle, workers: list[WorkerHandle], version: int) -> WeightRef:
        own(self.folder)
        ref: WeightRef = await actor.call("write_weights", str(self.folder), version, **self.publish_options(workers))
        return ref

    def served(self) -> Path | None:
        """The file with the weights that the workers serve, which after the sync may be older than the actor's."""
        if self.current is not None and self.current.kind != "weights":
            return None
        files = [file for folder in versions(self.folder) for file in folder.glob("model.safetensors")]
        return files[-1] if files else None

    def close(self) -> None:
        scratch.remove(self.folder)
