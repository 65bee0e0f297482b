"""A LoRA adapter loaded into a running server."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mrl.errors import SyncError
from mrl.types import WeightRef


class ServedAdapter:
    """An adapter on the server: its name there, its version, and its own copy of the published files.

    A server with several adapters rereads their files while requests use them, and by then the published files may have
    been deleted.
    """

    def __init__(self, ref: WeightRef) -> None:
        assert ref.path is not None
        self.version = ref.version
        self.name = f"mrl-{Path(ref.path).parent.name}-v{ref.version}-{uuid.uuid4().hex[:8]}"
        self.folder = Path(ref.path).parent / self.name
        self.users, self.served = 0, True
        try:
            shutil.copytree(ref.path, self.folder)
        except OSError as error:
            raise SyncError(f"the adapter could not be copied to {self.folder}: {error}") from error

    @contextmanager
    def used(self) -> Iterator[None]:
        """A request uses the adapter inside; its files are kept that long."""
        self.users += 1
        try:
            yield
        finally:
            self.users -= 1
            self._remove_unused()

    def replaced(self) -> None:
        """Called when no new requests will use it."""
        self.served = False
        self._remove_unused()

    def _remove_unused(self) -> None:
        if not self.served and not self.users:
            shutil.rmtree(self.folder, ignore_errors=True)
