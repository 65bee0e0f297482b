"""Messages on a stream: four bytes of length, one byte of kind, the body."""

from __future__ import annotations

import os
import struct

HEADER = struct.Struct(">IB")


class Closed(Exception):
    """The other side is gone."""


def pack(kind: bytes, body: bytes = b"") -> bytes:
    return HEADER.pack(len(body), kind[0]) + body


def read(fd: int) -> tuple[bytes, bytes]:
    """Blocking: the next message. For a side that trusts the other one. Raises Closed."""
    size, kind = HEADER.unpack(read_exactly(fd, HEADER.size))
    return bytes([kind]), read_exactly(fd, size)


def read_exactly(fd: int, size: int) -> bytes:
    data = os.read(fd, size) if size else b""
    if len(data) == size:
        return data
    parts, have = [data], len(data)
    while have < size:
        if not data:
            raise Closed
        data = os.read(fd, min(size - have, 1 << 20))
        parts.append(data)
        have += len(data)
    return b"".join(parts)


def write(fd: int, data: bytes) -> None:
    """All of it. Raises OSError."""
    done = os.write(fd, data)
    if done < len(data):
        view = memoryview(data)[done:]
        while view:
            view = view[os.write(fd, view) :]
