"""`direct`: workers in the actor's process use its module itself, so there is nothing to send."""

from __future__ import annotations

from pathlib import Path

from mrl.backends.base import WorkerHandle
from mrl.sync.base import confirm
from mrl.types import WeightRef


class DirectSync:
    """Only where actor and workers share a process (backend inline)."""

    def __init__(self, folder: Path) -> None:
        """Nothing is written; `folder` is not used."""

    async def sync(self, actor: WorkerHandle, workers: list[WorkerHandle], version: int) -> None:
        ref: WeightRef = await actor.call("share_module", version)
        for worker in workers:
            confirm(ref, worker, await worker.call("update_weights", ref))

    def served(self) -> None:
        """The workers serve what the actor has: nothing is kept apart."""

    def close(self) -> None:
        """Nothing to remove."""
