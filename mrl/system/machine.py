"""Which machine this is, as its kernel says."""

from __future__ import annotations

import functools
import os
import socket
import uuid
from pathlib import Path

from mrl.system.scratch import SHARED_MEMORY

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
ADDRESS = "MRL_ADDRESS"
"""Environment variable with the address of this machine, where it has several and others do not see all of them."""


@functools.cache
def machine_id() -> str:
    """An id that is equal for processes that see each other's shared memory, and only for those.

    A kernel gives itself a new random id whenever it boots, and every mounted file system in memory a device number of
    its own: containers on one machine have the first in common, and the second only where they share it. Host names are
    neither unique (cloned machines, containers) nor the same throughout a machine (containers).
    """
    try:
        memory = str(os.stat(SHARED_MEMORY).st_dev)
    except OSError:
        memory = "none"
    return f"{_kernel_id()}/{memory}"


def on_this_kernel(machine: str) -> bool:
    """Whether the process that called itself on `machine` (`machine_id`) ran on this kernel since it was booted: its
    file locks are seen from here then, whatever containers the two are in."""
    return machine.partition("/")[0] == _kernel_id()


def own_address() -> str:
    """The address that other machines see this one under: MRL_ADDRESS, or that of the route outwards; no packet is
    sent."""
    if given := os.environ.get(ADDRESS):
        return given
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # documentation's own network: only the route is looked up
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def free_port() -> int:
    """A port on which nobody listens now."""
    with socket.create_server(("", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def booted() -> float:
    """When this machine was booted, in seconds since 1970."""
    import psutil

    return float(psutil.boot_time())


def _kernel_id() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:  # no Linux: the network card, and when it was booted
        return f"{socket.gethostname()}-{uuid.getnode():x}-{booted():.0f}"
