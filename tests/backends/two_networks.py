"""Two network namespaces joined by a cable, as two machines: with it cut they hear nothing of each other."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress

HEAD, OTHER = "10.77.41.1", "10.77.41.2"
"""Addresses, of the first namespace and of the second."""


def can_have() -> bool:
    """Whether this machine lets us make namespaces: root, with iproute2."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        return False
    name = f"mrl-try-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode != 0:
        return False
    ip("netns", "del", name)
    return True


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class Networks:
    """names: of the two namespaces."""

    def __init__(self, names: tuple[str, str]) -> None:
        self.names = names

    def within(self, which: int) -> list[str]:
        """What to put before a command that is to run in one of them."""
        return ["ip", "netns", "exec", self.names[which]]

    def cut(self) -> None:
        ip("-n", self.names[1], "link", "set", "cable", "down")

    def heal(self) -> None:
        ip("-n", self.names[1], "link", "set", "cable", "up")


@contextmanager
def networks() -> Iterator[Networks]:
    names = (f"mrl-a-{os.getpid()}", f"mrl-b-{os.getpid()}")
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        for name, address in zip(names, (HEAD, OTHER), strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
        yield Networks(names)
    finally:
        for name in names:
            with suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)
