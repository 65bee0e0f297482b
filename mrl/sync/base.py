"""What a sync method is: it makes every rollout worker serve the actor's weights, or raises."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from mrl.backends.base import WorkerHandle
from mrl.errors import SyncError
from mrl.types import WeightRef


class WeightSync(Protocol):
    """Implemented by one file per method in this package."""

    def __init__(self, folder: Path) -> None:
        """folder: a directory of its own, for methods that pass weights through files."""
        ...

    async def sync(self, actor: WorkerHandle, workers: list[WorkerHandle], version: int) -> None:
        """Publish the actor's weights as `version`; returns once every worker serves them. Raises SyncError."""
        ...

    def served(self) -> Path | None:
        """A file with the weights the workers serve, where the method keeps one."""
        ...

    def close(self) -> None:
        """Remove what was written."""
        ...


def confirm(ref: WeightRef, worker: WorkerHandle, answer: dict[str, Any]) -> None:
    """Raise SyncError unless the worker says that it holds exactly what was published."""
    if answer["version"] != ref.version:
        raise SyncError(f"{worker.name}: serves version {answer['version']} after version {ref.version} was sent")
    if ref.checksum is not None and answer["checksum"] != ref.checksum:
        raise SyncError(
            f"{worker.name}: the weights it holds are not those that were sent as version {ref.version} "
            f"(checksum {answer['checksum']}, expected {ref.checksum})"
        )
