"""One rank of an actor, as a process of its container: see `Host`."""

from __future__ import annotations

import asyncio
import os
import socket
import sys

import modal

from mrl.backends.modal.settings import Settings
from mrl.backends.modal.storage import Mounted
from mrl.backends.sockets import serve
from mrl.system import shared_disk


def be_rank(name: str, descriptor: int) -> None:
    """Answer calls over a socket until it is closed, and exit."""
    shared_disk.register(Mounted(modal.Volume.from_name(Settings.from_environment().volume)))
    connection = socket.socket(fileno=descriptor)
    connection.setblocking(False)
    asyncio.run(serve(connection, name))
    os._exit(0)  # what still runs on threads is of no use to anybody


if __name__ == "__main__":
    be_rank(sys.argv[1], int(sys.argv[2]))
