"""Ending a process group so that nothing is left, in /dev/shm neither."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")
_TRACKER_SECONDS = 3.0


def end_group(group: int, shared: Iterable[Path] = ()) -> None:
    """Kill every process of the group but this one, and remove the shared memory that they have, or had (`shared`).

    Python's resource trackers last: they end by themselves when those they watch are gone, and remove the semaphores
    that those had no time to. Stopped ones are woken for it.
    """
    left = {*shared, *shared_memory(group)}
    for pid in _members(group):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT if _is_tracker(pid) else signal.SIGKILL)
    _wait_for(group)
    for pid in _members(group):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    _wait_for(group)  # the kernel takes a moment, longer on a busy machine
    for path in left:
        with contextlib.suppress(OSError):
            path.unlink()


def _wait_for(group: int) -> None:
    """Until no process of the group is left, or long enough."""
    end = time.monotonic() + _TRACKER_SECONDS
    while time.monotonic() < end and _members(group):
        time.sleep(0.01)


def shared_memory(group: int) -> set[Path]:
    """Files that the group's processes alone have mapped in /dev/shm, those in folders there not counted."""
    members = _members(group)
    own = _mapped(members)
    if not own:
        return set()
    everybody = {int(path.name) for path in Path("/proc").glob("[0-9]*")}
    own -= _mapped(everybody - {*members, group})
    with os.scandir(_SHARED_MEMORY) as entries:
        return {Path(entry.path) for entry in entries if entry.inode() in own}


def _mapped(pids: Iterable[int]) -> set[int]:
    """Inodes: a semaphore is mapped under another name than the one it gets."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
                if f"{_SHARED_MEMORY}/" in line:
                    found.add(int(line.split(maxsplit=5)[4]))
    return found


def _members(group: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, its_group = (path / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state != "Z" and int(path.name) != os.getpid():
                found.append(int(path.name))
    return found


def _is_tracker(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False
