"""The images that rollouts saw: one file each in the run's folder, named by its hash, however often it was seen."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from mrl.errors import StoreError
from mrl.types import Group

FOLDER = "media"
MOST_BYTES = 4 << 30
"""Of a run's images together. Further ones are recorded by hash alone, and steps with them cannot be replayed."""


class MediaFolder:
    """Writes a run's images. full: told once, when there is no more room."""

    def __init__(self, run: Path, full: Callable[[str], None], most: int = MOST_BYTES) -> None:
        self.folder, self.full, self.most = run / FOLDER, full, most
        self.bytes: int | None = None
        """In the folder; counted when the first image comes."""
        self.told = False
        self.written: set[str] = set()

    def add(self, groups: Iterable[Group]) -> None:
        """Write those images of these rollouts that are not there yet. Raises StoreError."""
        found = {
            image.sha256: image.data
            for group in groups
            for rollout in group.rollouts
            for sample in rollout.samples
            for image in sample.media
        }
        new = {sha256: data for sha256, data in found.items() if sha256 not in self.written}
        if not new:
            return
        try:
            self._begin()
            for sha256, data in new.items():
                if (self.folder / sha256).exists() or self._write(sha256, data):
                    self.written.add(sha256)
        except OSError as error:
            reason = error.strerror or error
            raise StoreError(f"{self.folder} cannot be written ({reason}); free space there") from error

    def _begin(self) -> None:
        if self.bytes is None:
            self.folder.mkdir(exist_ok=True)
            self.bytes = sum(entry.stat().st_size for entry in self.folder.iterdir())

    def _write(self, sha256: str, data: bytes) -> bool:
        assert self.bytes is not None
        if self.bytes + len(data) > self.most:
            if not self.told:
                self.told = True
                self.full(
                    f"the run's images take {self.bytes >> 20} MiB, and no more are kept than {self.most >> 20}: "
                    "further ones are recorded by hash alone, and steps with them cannot be replayed"
                )
            return False
        partial = self.folder / f"{sha256}.partial"
        partial.write_bytes(data)
        os.replace(partial, self.folder / sha256)
        self.bytes += len(data)
        return True


def read_image(run: Path, sha256: str) -> bytes:
    """An image that rollouts of this run saw. Raises StoreError where it is not there or not what it was."""
    path = run / FOLDER / sha256
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StoreError(f"{path}: the image is not in the run's record ({error.strerror}), only its hash") from None
    if hashlib.sha256(data).hexdigest() != sha256:
        raise StoreError(f"{path}: is not the image any more that it was when it was recorded")
    return data
