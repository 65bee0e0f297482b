"""Temporary folders that end with the process that made them, however it ends.

Each holds a file that its owner keeps locked. The kernel gives the lock back when the owner is gone, and whoever then
looks (the next run, or a process that outlives its owner) removes the folder. Unlike a process number, a lock means the
same in every container that sees the disk. Standard library only: this also runs in engines' own processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

LOCK = "owner.lock"
SHARED_MEMORY = Path("/dev/shm")
_locks: dict[Path, int] = {}


def make(kind: str, parent: Path | None = None) -> Path:
    """A new folder `mrl-<kind>-...` of this process's own. parent: None = where temporary files go.

    Folders there whose owners are gone are removed first.
    """
    where = parent or Path(tempfile.gettempdir())
    sweep(where)
    folder = Path(tempfile.mkdtemp(prefix=f"mrl-{kind}-", dir=where))
    claim(folder)
    return folder


def claim(folder: Path) -> None:
    """Make `folder` this process's own, creating it if it is missing. Calling it twice is allowed."""
    if folder in _locks:
        return
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / f"{LOCK}.{os.getpid()}"  # gets its name once it is locked: before, a sweep could take it
    descriptor = os.open(new, os.O_CREAT | os.O_RDWR, 0o600)
    with contextlib.suppress(OSError):  # a disk without locks: only its owner removes it then
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    new.replace(folder / LOCK)
    _locks[folder] = descriptor


def remove(folder: Path) -> None:
    """Remove a folder with everything in it. Calling it twice is allowed."""
    shutil.rmtree(folder, ignore_errors=True)
    descriptor = _locks.pop(folder, None)
    if descriptor is not None:
        os.close(descriptor)


def sweep(parent: Path) -> None:
    """Remove the folders `mrl-*` below `parent` whose owners are gone."""
    for folder in parent.glob("mrl-*"):
        remove_abandoned(folder)


def remove_abandoned(folder: Path) -> None:
    """Remove a folder that was claimed by a process that is gone; any other one, or another user's, is left alone."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR)
    except OSError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except OSError:  # its owner lives
        return
    finally:
        os.close(descriptor)
