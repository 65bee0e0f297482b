"""The processes of an engine `vllm` and what they share, as the system sees them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path


def processes_of(group: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            fields = (path / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(int(path.name))
    return found


def hosts(owner: int) -> list[int]:
    """The processes that speak to this owner's engines; each leads a group."""
    children = [pid for path in Path(f"/proc/{owner}/task").glob("*/children") for pid in path.read_text().split()]
    return [pid for pid in map(int, children) if b"vllm.process.host" in command(pid)]


def core_of(group: int) -> int | None:
    """vLLM's own process, with the model, behind the one that speaks to us and from which it was forked."""
    found = [pid for pid in processes_of(group) if pid != group and b"vllm.process.host" in command(pid)]
    return found[0] if found else None


def found(pid: int | None) -> int:
    """To be signalled: number 0 would be the caller's own group."""
    assert pid
    return pid


def command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def shared_by(pids: list[int]) -> set[Path]:
    """Files in shared memory that these processes have mapped, by what they are called there."""
    inodes = set()
    for pid in pids:
        try:
            mapped = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except OSError:
            continue
        inodes |= {int(line.split()[4]) for line in mapped if "/dev/shm/" in line}
    folders = ["/dev/shm", *map(str, Path("/dev/shm").glob("mrl-*/"))]
    return {
        Path(e.path) for folder in folders if os.path.isdir(folder) for e in os.scandir(folder) if e.inode() in inodes
    }


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
