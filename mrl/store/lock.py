"""One writer per run: a lock the kernel drops when its process ends, however it ends."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

from mrl.errors import StoreError
from mrl.system.machine import machine_id

LOCK = "run.lock"
ATTEMPTS = 5
"""Somebody who asks whether a run is being written holds the lock for an instant."""

_HELD: WeakSet[RunLock] = WeakSet()


class RunLock:
    """Held from construction to `release`."""

    def __init__(self, folder: Path) -> None:
        """Raises StoreError, naming the process, when the run is being written; OSError when there can be no lock."""
        self._descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        for attempt in range(ATTEMPTS):
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if attempt == ATTEMPTS - 1:
                    os.close(self._descriptor)
                    raise StoreError(_refusal(folder)) from None
                time.sleep(0.02)
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps(_who()).encode(), 0)
        _HELD.add(self)

    def release(self) -> None:
        """Let others write. May be called twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        _HELD.discard(self)


def is_locked(folder: Path) -> bool:
    """Whether a process is writing this run now."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def machine_of_writer(folder: Path) -> str | None:
    """The machine (`machine_id`) of the process that writes this run, or wrote it last; None where the lock does not
    say, as in runs of older versions."""
    machine: str | None = _owner(folder).get("machine")
    return machine


def _who() -> dict[str, Any]:
    """The process; with the machine's name, which is for people."""
    return {"pid": os.getpid(), "host": socket.gethostname(), "machine": machine_id()}


def _owner(folder: Path) -> dict[str, Any]:
    """What `_who` said in the process that took the lock last."""
    owner = None
    with suppress(OSError, ValueError):
        owner = json.loads((folder / LOCK).read_text())
    return owner if isinstance(owner, dict) else {}


def _refusal(folder: Path) -> str:
    owner = _owner(folder)
    who = f"process {owner.get('pid', 'unknown')}"
    if owner.get("machine") not in (None, machine_id()):
        who += f" on {owner.get('host')}"
    return f"{folder} is being written by {who}; wait for it, end it, or choose another run_dir"


def _let_go_in_child() -> None:
    """A forked child shares the lock, and would keep it after its parent is gone."""
    for lock in list(_HELD):
        lock.release()


os.register_at_fork(after_in_child=_let_go_in_child)
