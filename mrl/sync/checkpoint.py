"""`checkpoint`: a whole model folder, from which the engine is rebuilt. Slow; for engines that can do nothing else."""

from __future__ import annotations

from typing import Any

from mrl.backends.base import WorkerHandle
from mrl.sync.base import WeightSync
from mrl.system import scratch
from mrl.types import WeightRef
from mrl.weights.files import own


class CheckpointSync(WeightSync):
    """Works between processes that see the same disk."""

    async def publish(self, actor: WorkerHandle, workers: list[WorkerHandle], version: int) -> WeightRef:
        own(self.folder)
        dtype = self.publish_options(workers)["dtype"]
        ref: WeightRef = await actor.call("write_model", str(self.folder), version, dtype=dtype)
        return ref

    async def load(self, worker: WorkerHandle, ref: WeightRef) -> dict[str, Any]:
        answer: dict[str, Any] = await worker.call("reload_from_checkpoint", ref.path, ref.version)
        return answer

    def close(self) -> None:
        scratch.remove(self.folder)
