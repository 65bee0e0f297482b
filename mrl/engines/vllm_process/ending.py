"""Ending a process group so that nothing is left, in /dev/shm neither."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

_TRACKER_SECONDS = 3.0


def end_group(group: int) -> None:
    """Kill every process of the group but this one.

    Python's resource trackers last: they end by themselves when those they watch are gone, and remove the shared memory
    and semaphores that those had no time to. Stopped ones are woken for it.
    """
    for pid in _members(group):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT if _is_tracker(pid) else signal.SIGKILL)
    end = time.monotonic() + _TRACKER_SECONDS
    while time.monotonic() < end and _members(group):
        time.sleep(0.01)
    for pid in _members(group):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


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
