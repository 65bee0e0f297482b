"""Disks on which others see what was written only once it is committed, and new things only once they look again.

Modal's Volumes are such disks. Who writes for other machines says so (`commit`), who reads what another one has written
asks for a copy (`bring`); for ordinary disks the first does nothing, and the second is copying.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Protocol


class SharedDisk(Protocol):
    """One such disk, as this machine sees it."""

    root: Path

    def commit(self) -> None:
        """Let others see what was written. Raises OSError."""
        ...

    def bring(self, source: Path, target: Path) -> bool:
        """Copy a file or folder from there, as it is now. False = it is not there. Raises OSError."""
        ...


_disks: list[SharedDisk] = []


def register(disk: SharedDisk) -> None:
    """Of this process, from now on."""
    _disks.append(disk)


def commit(path: Path) -> None:
    """Let others see what was written at `path`. Raises OSError."""
    disk = _disk_of(path)
    if disk is not None:
        disk.commit()


def bring(source: Path, target: Path) -> bool:
    """Copy a file or folder to `target`, where nothing is yet. False = it is not there. Raises OSError."""
    disk = _disk_of(source)
    return copy(source, target) if disk is None else disk.bring(source, target)


def copy(source: Path, target: Path) -> bool:
    """`bring`, from an ordinary disk."""
    if source.is_dir():
        shutil.copytree(source, target)
    elif source.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)
    else:
        return False
    return True


def _disk_of(path: Path) -> SharedDisk | None:
    return next((disk for disk in _disks if path.is_relative_to(disk.root)), None)
