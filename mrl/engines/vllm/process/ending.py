"""Ending a process group without leaving processes, or files in /dev/shm."""

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
    """Kill every process of the group but this one, and remove their shared memory, also that they once had (`shared`).

    Python's resource trackers come last: they exit once the processes they track are gone, after removing leftover
    semaphores. Stopped trackers are continued for that.
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
    """Wait until no process of the group is left, for a few seconds at most."""
    end = time.monotonic() + _TRACKER_SECONDS
    while time.monotonic() < end and _members(group):
        time.sleep(0.01)


def shared_memory(group: int) -> set[Path]:
    """Files in /dev/shm (not in its folders) that only the group's processes have mapped."""
    members = _members(group)
    own = _mapped(members)
    if not own:
        return set()
    everybody = {int(path.name) for path in Path("/proc").glob("[0-9]*")}
    own -= _mapped(everybody - {*members, group})
    with os.scandir(_SHARED_MEMORY) as entries:
        return {Path(entry.path) for entry in entries if entry.inode() in own}


def _mapped(pids: Iterable[int]) -> set[int]:
    """Inodes in /dev/shm that these processes have mapped. Not names: a semaphore is renamed after it is mapped."""
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
