"""An actor over several containers: the first one starts ranks in the others, and speaks with them over the cluster's
network.

driver ── inputs, to every container ──▶ first container ── sockets ──▶ ranks in the others
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mrl.backends.sockets import SocketLink
from mrl.system.machine import ADDRESS

CONNECT_SECONDS = 300.0
"""How long the first container waits for another one, which may still be importing."""
BRING_SECONDS = 3600.0
"""How long another container may copy files: a checkpoint of a large model takes its time."""
_ASK_SECONDS = 30.0
_LENGTH = struct.Struct(">I")
_LONGEST = 16 << 20


@dataclass(frozen=True)
class Cluster:
    """addresses: of its containers, in order. own: which of them this is. secret: what the others know too."""

    addresses: tuple[str, ...]
    own: int
    secret: str

    def place(self, rank: int, ranks: int) -> int:
        """The container that a rank lives in: as many in each."""
        return rank // (ranks // len(self.addresses))

    @property
    def port(self) -> int:
        """Where containers but the first listen, in a network that only their cluster has."""
        return 10_000 + zlib.crc32(self.secret.encode()) % 20_000


def rank_environment(rank: int, ranks: int, here: int, address: str | None = None) -> dict[str, str]:
    """What a rank's process needs to know. here: ranks in its container. address: this container's in its cluster."""
    env = {"RANK": str(rank), "LOCAL_RANK": str(rank % here), "WORLD_SIZE": str(ranks)}
    env["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // here))
    if address is not None:
        env[ADDRESS] = address
        if (interface := interface_of(address)) is not None:
            env["GLOO_SOCKET_IFNAME"] = interface
    return env


def start_rank(name: str, env: Mapping[str, str], connection: socket.socket) -> None:
    """A process for one rank, which answers calls over the connection. Closes it here."""
    command = [sys.executable, "-m", "mrl.backends.modal.rank", name, str(connection.fileno())]
    subprocess.Popen(command, env={**os.environ, **env}, pass_fds=[connection.fileno()])
    connection.close()


async def start_there(cluster: Cluster, name: str, rank: int, ranks: int) -> SocketLink:
    """A rank in another container. Raises OSError."""
    connection = await _ask(cluster, cluster.place(rank, ranks), {"name": name, "rank": rank, "ranks": ranks})
    link = SocketLink(name, connection)
    await link.open()
    return link


async def bring_there(cluster: Cluster, place: int, files: Mapping[str, str]) -> None:
    """Have another container copy files from the Volume (`host.bring_files`). Raises OSError."""
    connection = await _ask(cluster, place, {"files": dict(files)})
    connection.close()


def serve_cluster(cluster: Cluster, bring: Any) -> None:
    """Start ranks and bring files as the first container asks, on a thread. bring: `host.bring_files`."""
    address = cluster.addresses[cluster.own]
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, cluster.port), family=family)

    def serve() -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_serve_one, args=(cluster, connection, bring), daemon=True).start()

    threading.Thread(target=serve, name="mrl-cluster", daemon=True).start()


def interface_of(address: str) -> str | None:
    """The network interface that has an address; None where none is found."""
    import psutil

    for name, found in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in found):
            return str(name)
    return None


# --- inner ------------------------------------------------------------------------------------------------------------


def _serve_one(cluster: Cluster, connection: socket.socket, bring: Any) -> None:
    connection.settimeout(_ASK_SECONDS)
    try:
        asked = _read(connection)
        if not hmac.compare_digest(str(asked.get("secret")), cluster.secret):
            raise PermissionError("it does not know the secret")
        if "files" in asked:
            bring(asked["files"])
            _write(connection, {"done": True})
            connection.close()
            return
        here = asked["ranks"] // len(cluster.addresses)
        env = rank_environment(asked["rank"], asked["ranks"], here, cluster.addresses[cluster.own])
        _write(connection, {"done": True})
        connection.settimeout(None)
        start_rank(asked["name"], env, connection)
    except Exception as error:
        with connection:
            try:
                _write(connection, {"error": f"{type(error).__name__}: {error}"})
            except OSError:
                return


async def _ask(cluster: Cluster, place: int, asked: dict[str, Any]) -> socket.socket:
    """The connection, once what was asked is done. Raises OSError."""
    return await asyncio.to_thread(_asked, cluster, place, {**asked, "secret": cluster.secret})


def _asked(cluster: Cluster, place: int, asked: dict[str, Any]) -> socket.socket:
    address = cluster.addresses[place]
    connection = _connected(address, cluster.port)
    try:
        connection.settimeout(BRING_SECONDS)
        _write(connection, asked)
        answer = _read(connection)
        if "error" in answer:
            raise OSError(f"container {address}: {answer['error']}")
    except BaseException:
        connection.close()
        raise
    connection.setblocking(False)
    return connection


def _connected(address: str, port: int) -> socket.socket:
    """To a container that may not listen yet. Raises OSError."""
    end = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            return socket.create_connection((address, port), timeout=_ASK_SECONDS)
        except OSError as error:
            if time.monotonic() > end:
                raise OSError(f"container {address} of the cluster cannot be reached: {error}") from error
            time.sleep(0.5)


def _write(connection: socket.socket, content: dict[str, Any]) -> None:
    data = json.dumps(content).encode()
    connection.sendall(_LENGTH.pack(len(data)) + data)


def _read(connection: socket.socket) -> dict[str, Any]:
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    if length > _LONGEST:
        raise ValueError(f"{length} bytes are too many")
    found = json.loads(_exactly(connection, length))
    if not isinstance(found, dict):
        raise TypeError("it is no object")
    return found


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise ConnectionError("it was closed")
        data += part
    return bytes(data)
