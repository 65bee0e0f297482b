"""The Volume: what runs keep at Modal, what is sent there, and how it looks from a container.

`/storage/checkpoints/RUN` is a run's own, `/storage/data` what was put there by content, `/storage/hf_cache` the cache
of models, which all runs share and no run writes its weights to.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar

from mrl.store.checkpoints import MANIFEST
from mrl.system import shared_disk
from mrl.system.threads import in_thread

if TYPE_CHECKING:
    import modal

STORAGE = Path("/storage")
CHECKPOINTS, DATA, HUB = "checkpoints", "data", "hf_cache"
COPIES = "/tmp/mrl-files"
"""Where containers have their own copies of what was put."""


class Mounted:
    """The Volume in a container; see SharedDisk."""

    root = STORAGE

    def __init__(self, volume: modal.Volume) -> None:
        self.volume = volume

    def commit(self) -> None:
        """See SharedDisk."""
        with _as_os_error():
            self.volume.commit()

    def bring(self, source: Path, target: Path) -> bool:
        """See SharedDisk. While this process has a file there open, the mount cannot be brought up to date, and what is
        wanted is read through Modal's interface."""
        try:
            self.volume.reload()
        except RuntimeError as error:
            if "open files" not in str(error):
                raise OSError(str(error)) from error
            return download(self.volume, str(source), target)
        return shared_disk.copy(source, target)


class Storage:
    """The Volume from where the loop runs. Paths are as workers see them."""

    def __init__(self, volume: Any) -> None:
        self.volume = volume
        self.files: dict[str, str] = {}
        """Where on the Volume what was put lies, by the path that workers know it under."""
        self.sending: dict[Path, asyncio.Task[str]] = {}
        """Once for each file or folder, however many workers need it."""

    async def put(self, path: Path) -> str:
        """Send a file or folder, unless it is there. Returns the path of workers' copies. Raises OSError."""
        path = path.absolute()
        sending = self.sending.get(path)
        if sending is None or (sending.done() and (sending.cancelled() or sending.exception() is not None)):
            sending = self.sending[path] = asyncio.create_task(self._put(path))
        return await asyncio.shield(sending)

    async def _put(self, path: Path) -> str:
        source = await self._checkpoint(path)
        if source is None:
            digest = await in_thread(digest_of, path)
            source = f"{STORAGE}/{DATA}/{digest}/{path.name}"
            if not await self.has(source):
                await in_thread(self.upload, path, source)
        there = f"{COPIES}/{hashlib.sha256(source.encode()).hexdigest()[:16]}/{path.name}"
        self.files[there] = source
        return there

    async def has(self, path: str) -> bool:
        """Whether there is a file or folder."""
        import modal

        folder, name = os.path.split(_inside(path))
        try:
            entries = await self.volume.listdir.aio(folder or "/")
        except (modal.exception.NotFoundError, FileNotFoundError):
            return False
        return any(PurePosixPath(entry.path).name == name for entry in entries)

    async def fetch(self, there: str, here: Path) -> None:
        """Bring a run's checkpoint here, whole or not at all; earlier ones are removed there. Raises OSError."""
        await in_thread(self.download_to, there, here)
        folder, newest = os.path.split(there)
        for entry in await self.volume.listdir.aio(_inside(folder)):
            if (step := step_of(entry.path)) is not None and step < (step_of(newest) or 0):
                await self.remove(f"{STORAGE}/{entry.path}")

    async def remove(self, there: str) -> None:
        """Remove a folder, if it is there."""
        import modal

        with contextlib.suppress(modal.exception.Error, FileNotFoundError):
            await self.volume.remove_file.aio(_inside(there), recursive=True)

    def listing(self, there: str) -> list[str]:
        """What a folder holds, as paths on the Volume; nothing where it is not there. Raises OSError."""
        import modal

        with _as_os_error():
            try:
                return [entry.path for entry in self.volume.listdir(_inside(there))]
            except (modal.exception.NotFoundError, FileNotFoundError):
                return []

    def download_to(self, there: str, here: Path) -> None:
        """Copy a file or folder here, whole or not at all, over a file that is here. Raises OSError."""
        partial = here.with_name(f"{here.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.unlink(missing_ok=True)
        here.parent.mkdir(parents=True, exist_ok=True)
        if not download(self.volume, there, partial):
            raise FileNotFoundError(f"{there} is not there")
        partial.replace(here)

    async def _checkpoint(self, path: Path) -> str | None:
        """Where the same checkpoint is on the Volume, if this is one that was written there."""
        manifest = path / MANIFEST
        if not manifest.is_file():
            return None
        there = f"{folder_of(path.parent.parent)}/{path.parent.name}/{path.name}"
        if not await self.has(f"{there}/{MANIFEST}"):
            return None
        found = b"".join([part async for part in self.volume.read_file.aio(_inside(f"{there}/{MANIFEST}"))])
        return there if found == manifest.read_bytes() else None

    def upload(self, path: Path, source: str) -> None:
        with _as_os_error(), self.volume.batch_upload(force=True) as batch:
            if path.is_dir():
                batch.put_directory(str(path), "/" + _inside(source))
            else:
                batch.put_file(str(path), "/" + _inside(source))


class StorageThere(Storage):
    """The same where the loop is in a container itself: a run's folder there has its checkpoints on the Volume."""

    after_fetch: ClassVar[list[Callable[[], None]]] = []
    """What is done once a checkpoint is there."""

    async def fetch(self, there: str, here: Path) -> None:
        """See the checkpoint that was written. Raises OSError."""
        try:
            await self.volume.reload.aio()
        except RuntimeError as error:
            if "open files" not in str(error):
                raise OSError(str(error)) from error
            await in_thread(self.download_to, there, here)
        if not here.exists():
            raise FileNotFoundError(f"{there} is not there")
        for work in self.after_fetch:
            await in_thread(work)


def storage_of(volume: Any) -> Storage:
    """The Volume from this process."""
    import modal

    return Storage(volume) if modal.is_local() else StorageThere(volume)


def folder_of(run_dir: Path) -> str:
    """A run's folder on the Volume. Runs of one name in different folders of this machine have different ones."""
    import modal

    path = run_dir.absolute()
    if not modal.is_local():
        return f"{STORAGE}/{CHECKPOINTS}/{path.name}"
    whose = hashlib.sha256(f"{uuid.getnode()}:{path}".encode()).hexdigest()[:6]
    return f"{STORAGE}/{CHECKPOINTS}/{path.name}-{whose}"


def download(volume: Any, there: str, target: Path) -> bool:
    """Read a file or folder through Modal's interface. False = it is not there. Raises OSError."""
    import modal
    from modal.types import FileEntryType

    inside = _inside(there)
    with _as_os_error():
        try:
            entries = volume.listdir(inside, recursive=True)
        except (modal.exception.NotFoundError, FileNotFoundError):
            return False
        files = [entry.path for entry in entries if entry.type == FileEntryType.FILE]
        for path in files:
            relative = os.path.relpath(path.lstrip("/"), inside)
            to = target if relative == "." else target / relative
            to.parent.mkdir(parents=True, exist_ok=True)
            with to.open("wb") as file:
                volume.read_file_into_fileobj(path, file)
    return bool(files)


def digest_of(path: Path) -> str:
    """Of a file's or folder's content."""
    whole = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            whole.update(f"{file.relative_to(path)}\0".encode())
            with file.open("rb") as opened:
                whole.update(hashlib.file_digest(opened, "sha256").digest())
    return whole.hexdigest()[:24]


def step_of(path: str) -> int | None:
    """Of a whole checkpoint's folder; None = it is none."""
    number = PurePosixPath(path).name.removeprefix("step-")
    return int(number) if number.isdigit() else None


def _inside(path: str) -> str:
    return os.path.relpath(path, STORAGE)


@contextlib.contextmanager
def _as_os_error() -> Iterator[None]:
    import modal

    try:
        yield
    except (modal.exception.Error, RuntimeError) as error:
        raise OSError(f"Modal's Volume: {error}") from error
