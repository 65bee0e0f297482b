"""`reload`: the actor writes its weights to files, every worker loads them into the model it has."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from mrl.backends.base import WorkerHandle
from mrl.sync.base import confirm
from mrl.types import WeightRef


class ReloadSync:
    """Works between processes that see the same disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    async def sync(self, actor: WorkerHandle, workers: list[WorkerHandle], version: int) -> None:
        ref: WeightRef = await actor.call("write_weights", str(self.folder), version)
        answers = await asyncio.gather(*(worker.call("update_weights", ref) for worker in workers))
        for worker, answer in zip(workers, answers, strict=True):
            confirm(ref, worker, answer)

    def served(self) -> Path | None:
        """The file with the weights that the workers serve, which after the sync may be older than the actor's."""
        files = sorted(self.folder.glob("v*/model.safetensors"))
        return files[-1] if files else None

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
