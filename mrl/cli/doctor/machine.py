"""What machine this is. Nothing here may fail: what cannot be read is None."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from mrl.system.units import size


@dataclass(slots=True)
class Machine:
    """Sizes in bytes."""

    python: str
    os: str
    cores: int
    """Those this process may use."""
    memory: int | None
    """The machine's, or the container's limit where that is lower."""
    disk_free: int | None
    """In the current folder, where runs go."""


def machine() -> Machine:
    """This machine, without importing anything heavy."""
    disk = None
    with contextlib.suppress(OSError):
        disk = shutil.disk_usage(".").free
    return Machine(f"{platform.python_version()} ({sys.executable})", platform.platform(), _cores(), _memory(), disk)


def gpus() -> tuple[list[str], str | None]:
    """Names of the accelerators torch can use, and why torch cannot be asked (None when it can)."""
    try:
        import torch
    except Exception as error:  # a broken wheel raises OSError, RuntimeError, anything: that is what is reported
        return [], f"torch does not import: {type(error).__name__}: {error}"
    found = []
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        found.append(f"cuda:{index} {device.name}, {size(device.total_memory)}")
    if torch.backends.mps.is_available():
        found.append("mps")
    return found, None


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory() -> int | None:
    sizes = []
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sizes.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # "max" is no number: no limit
            sizes.append(int(Path(limit).read_text()))
    return min(sizes, default=None)
