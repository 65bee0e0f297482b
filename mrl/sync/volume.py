"""`volume`: through a directory that several machines see (NFS, a Modal Volume, ...). Workers pull.

A version is complete or absent: it is written under another name, fsynced, and renamed. Workers wait
until their machine sees it, copy it to their own disk, and check what they copied: when the network disk
fails, that is an error message, and not the crash of a worker that reads mapped memory.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from mrl.backends.base import WorkerHandle
from mrl.errors import SyncError
from mrl.sync.base import WeightSync
from mrl.system import shared_disk
from mrl.types import WeightRef
from mrl.weights.tensors import FILE

_POLL_SECONDS = 0.05

WAIT = 0.75
"""Share of the deadline that workers wait for a version to appear, so that they say what is missing in time."""


class VolumeSync(WeightSync):
    """`folder` is on the shared disk, under the same path everywhere."""

    async def publish(self, actor: WorkerHandle, workers: list[WorkerHandle], version: int) -> WeightRef:
        ref: WeightRef = await actor.call(
            "write_weights", str(self.folder), version, durable=True, keep=2, **self.publish_options(workers)
        )
        ref.pull_seconds = WAIT * self.deadline
        return ref

    def served(self) -> Path | None:
        """The file with the weights that the workers serve."""
        if self.current is None or self.current.kind != "weights" or self.current.path is None:
            return None
        return Path(self.current.path) / FILE

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def pull(ref: WeightRef, folder: Path) -> WeightRef:
    """Copy a published version below `folder`, and return a reference to the copy. Raises SyncError."""
    assert ref.path is not None
    assert ref.pull_seconds is not None
    source, end = Path(ref.path), time.monotonic() + ref.pull_seconds
    target = folder / source.name
    try:
        shutil.rmtree(folder, ignore_errors=True)
        while not shared_disk.bring(source, target):
            if time.monotonic() > end:
                raise SyncError(f"{source} did not appear here within {ref.pull_seconds:.0f} s; is the disk shared?")
            time.sleep(_POLL_SECONDS)
    except OSError as error:
        raise SyncError(f"{source} could not be copied to {folder}: {error}") from error
    return WeightRef(
        ref.version, path=str(target), kind=ref.kind, checksum=ref.checksum, bytes=ref.bytes, base=ref.base
    )
