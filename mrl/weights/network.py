"""A folder of weights from one machine's memory into another's, over a TCP connection.

The publisher listens. A reader sends the token that came with the reference to a version, and the version it wants. The
checksum of the tensors is checked as with every sync method, so a transfer that was overtaken by the next version is
refused and not served. Not encrypted: for private networks.

    reader -> token (32 bytes), version (8 bytes)
    publisher -> length (8 bytes) and JSON [[name, size], ...], then the files' bytes one after the other
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import struct
import threading
from pathlib import Path
from time import monotonic

from mrl.errors import SyncError
from mrl.system.machine import own_address
from mrl.system.scratch import LOCK

_TOKEN_BYTES = 32
_NUMBER = struct.Struct(">q")
_PIECE = 1 << 20
_CONNECT_SECONDS = 20.0
_STALL_SECONDS = 60.0
"""Seconds without a byte after which the other side counts as gone."""


class WeightServer:
    """Serves the folder of the version published last, to any number of readers."""

    def __init__(self) -> None:
        self.token = secrets.token_hex(_TOKEN_BYTES // 2)
        self._version, self._folder = -1, Path()
        self._listener = socket.create_server(("", 0))
        port = self._listener.getsockname()[1]
        self.addresses = [f"{host}:{port}" for host in dict.fromkeys((own_address(), socket.gethostname()))]
        """Where readers may find it, the likeliest first."""
        self._thread = threading.Thread(target=self._accept, name="mrl-weight-server", daemon=True)
        self._thread.start()

    def publish(self, folder: Path, version: int) -> None:
        """Serve this version from now on."""
        self._version, self._folder = version, folder

    def close(self) -> None:
        """Stop accepting readers."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._answer, args=(connection,), name="mrl-weights", daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        # A reader that goes away, or is not one, loses its connection and nothing else.
        with connection, contextlib.suppress(OSError, EOFError):
            connection.settimeout(_STALL_SECONDS)
            token = _receive(connection, _TOKEN_BYTES)
            (version,) = _NUMBER.unpack(_receive(connection, _NUMBER.size))
            if not hmac.compare_digest(token, self.token.encode()) or version != self._version:
                return
            paths = sorted(path for path in self._folder.iterdir() if path.is_file() and path.name != LOCK)
            sizes = json.dumps([[path.name, path.stat().st_size] for path in paths]).encode()
            connection.sendall(_NUMBER.pack(len(sizes)) + sizes)
            for path in paths:
                with path.open("rb") as file:
                    connection.sendfile(file)


def fetch(addresses: list[str], token: str, version: int, folder: Path) -> None:
    """Download `version` from the publisher into `folder`, replacing what is there. Raises SyncError."""
    start = monotonic()
    with _connect(addresses) as connection:
        try:
            connection.settimeout(_STALL_SECONDS)
            connection.sendall(token.encode() + _NUMBER.pack(version))
            (length,) = _NUMBER.unpack(_receive(connection, _NUMBER.size))
            files = json.loads(_receive(connection, length))
            folder.mkdir(parents=True, exist_ok=True)
            for old in folder.iterdir():
                if old.name not in {name for name, _ in files}:
                    old.unlink()
            for name, size in files:
                _receive_file(connection, folder / Path(name).name, size)
        except EOFError:
            raise SyncError(
                f"{addresses[0]} ended the connection before version {version} was whole: it has another version by "
                "now, or does not know the token"
            ) from None
        except (OSError, ValueError) as error:
            after = f"after {monotonic() - start:.1f} s"
            raise SyncError(f"version {version} from {addresses[0]} broke off {after}: {error}") from error


def _connect(addresses: list[str]) -> socket.socket:
    problems = []
    for address in addresses:
        host, _, port = address.rpartition(":")
        try:
            return socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS)
        except OSError as error:
            problems.append(f"{address}: {error}")
    raise SyncError(
        f"the actor cannot be reached from {socket.gethostname()} ({'; '.join(problems)}); open the network between "
        "them, or use weight_sync_method: volume"
    )


def _receive(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = connection.recv(min(_PIECE, size - len(data)))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


def _receive_file(connection: socket.socket, path: Path, size: int) -> None:
    buffer, left = memoryview(bytearray(_PIECE)), size
    with path.open("wb") as file:
        while left:
            count = connection.recv_into(buffer, min(_PIECE, left))
            if not count:
                raise EOFError
            file.write(buffer[:count])
            left -= count
