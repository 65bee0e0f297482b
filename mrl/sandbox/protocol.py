"""What the processes of the sandbox say to each other: one table of messages, and how one travels.

A message is four bytes of length, one byte of kind, the body. Standard library only: this file is loaded inside too.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

HEADER, DESCRIPTOR = struct.Struct(">Ic"), struct.Struct("=i")
MAX_MESSAGE = 64_000_000
"""Bytes of one message from a program to its judge."""


class Kind(Enum):
    """byte, sender, receiver. Client: the trainer's process. Slot: the supervisor. Server: its fork-server. Program and
    judge are confined."""

    REQUEST = b"x", "client", "slot"
    READY = b"r", "slot or server", "client or slot"
    NOT_READY = b"f", "slot", "client"
    OBSERVATION = b"o", "slot", "client"
    HELLO = b"h", "agent", "client"
    """Of a machine apart. There, REQUEST and OBSERVATION begin with eight bytes of number, and NOT_READY says that
    nothing will follow."""

    LAUNCH = b"L", "slot", "server"
    """Fork a child, or two, for which the descriptors come along. Between slot and server a message is a datagram: the
    byte, and a fixed form, see `Datagram`."""
    STARTED = b"T", "server", "slot"
    """Of each child, with a pidfd."""
    REAP = b"R", "slot", "server"
    ENDED = b"W", "server", "slot"
    """The answer to REAP."""
    LOST = b"G", "server", "slot"
    """Why it ends. Its last message."""

    SCRIPT = b"s", "slot", "program"
    """The program, to be run as it is."""
    PROGRAM = b"p", "slot", "program"
    """The program, to be asked afterwards."""
    PLAN = b"t", "slot", "judge"
    """The tests: the first thing a judge is told."""
    NEXT = b"N", "slot", "judge"
    """The same tests again, for another program: the link to it comes along."""
    OUTPUT = b"u", "slot", "judge"
    """What a script printed; after the tests that are Python, in the order of the tests."""

    CONFINED = b"C", "program or judge", "slot"
    """First of all, and only once: until then it is our own code that speaks."""
    NOT_CONFINED = b"S", "program or judge", "slot"
    ERROR = b"E", "program", "slot"
    MEMORY = b"M", "program", "slot"
    LEFT = b"Q", "program", "slot"
    """It raised, ran out of memory, or exited while it was loaded. It is the program's word, and earns nothing."""

    COMPARED = b"B", "judge", "slot"
    """The answer to OUTPUT: a result."""
    BROKEN = b"Z", "judge", "slot"
    """The program sent what no honest one sends. The judge's last message."""
    FAULT = b"F", "judge", "slot"
    """The tests could not be read, for a reason of ours: no program is judged. Instead of everything else."""
    END = b"D", "judge", "slot"
    """Every test that is Python has its result. They are in the judge's notes, a line each, which wake nobody."""

    WANT = b"w", "judge", "program"
    """Once, before anything else: names."""
    NAMES = b"n", "program", "judge"
    """Once, when it is loaded: the answer to WANT."""
    ASK = b"q", "judge", "program"
    ANSWER = b"V", "program", "judge"
    """To the question that is open, with its token."""
    RAISE = b"X", "program", "judge"
    """The same: the question's answer is an exception."""
    CALLBACK = b"K", "program", "judge"
    """While a question is open: a function of the tests is called. Questions may come before its RETURN."""
    RETURN = b"l", "judge", "program"

    byte: bytes

    def __new__(cls, byte: bytes, sender: str, receiver: str) -> Kind:
        made = object.__new__(cls)
        made._value_ = made.byte = byte
        return made


_KINDS = {kind.byte: kind for kind in Kind}


class Datagram:
    """A message between a slot and its server: the byte of its kind, and numbers in a fixed form."""

    def __init__(self, kind: Kind, form: str) -> None:
        self.byte, self.form = kind.byte, struct.Struct(f"=c{form}")

    def pack(self, *numbers: Any) -> bytes:
        return self.form.pack(self.byte, *numbers)

    def unpack(self, data: bytes) -> tuple[Any, ...]:
        """Raises ValueError for another message, with the text of Kind.LOST."""
        if data[:1] != self.byte or len(data) != self.form.size:
            raise ValueError(data[1:].decode("utf-8", "replace")[:500] or "the server is gone")
        return self.form.unpack(data)[1:]


PROGRAM, JUDGE, BOTH = range(3)
LAUNCH = Datagram(Kind.LAUNCH, "BdIIII")
"""PROGRAM, JUDGE or BOTH (the judge first, and then the descriptors of both), seconds of processor time, megabytes of
scratch and of memory, open files, threads."""
STARTED, REAP = Datagram(Kind.STARTED, "i"), Datagram(Kind.REAP, "i?")
"""A pid. A pid or 0, and whether the execution is over."""
ENDED = Datagram(Kind.ENDED, "idq")
"""What `kernel.wait` says."""

_coder: Any = json.encoder
_scan = vars(json.JSONDecoder())["scan_once"]
_chunks: Callable[..., Iterable[str]] = json.JSONEncoder(check_circular=False).iterencode
if _coder.c_make_encoder is not None:  # what `iterencode` makes anew each time
    _default, _text = json.JSONEncoder().default, _coder.encode_basestring_ascii
    _chunks = _coder.c_make_encoder(None, _default, _text, None, ":", ",", False, False, True)


class Closed(Exception):
    """The other side is gone."""


def pack(kind: Kind, body: bytes = b"") -> bytes:
    return HEADER.pack(len(body), kind.byte) + body


def send(fd: int, kind: Kind, body: bytes = b"") -> None:
    """Blocking. Raises OSError."""
    write(fd, HEADER.pack(len(body), kind.byte) + body)


def dump(value: Any) -> bytes:
    """JSON, as `json.dumps` makes it, by a shorter way: every function on it costs each child pages."""
    return "".join(_chunks(value, 0)).encode()


def parse(body: bytes) -> Any:
    """The JSON that it begins with. Raises ValueError, RecursionError."""
    try:
        return _scan(body.decode(), 0)[0]
    except StopIteration:
        raise ValueError("no JSON") from None


def receive(fd: int) -> tuple[Kind, bytes]:
    """Blocking: the next message. Raises Closed, and ValueError for one that nobody sends."""
    size, byte = HEADER.unpack(read_exactly(fd, HEADER.size))
    kind = _KINDS.get(byte)
    if kind is None or size > MAX_MESSAGE:
        raise ValueError("a message that is none")
    return kind, read_exactly(fd, size)


def take(received: bytearray, most: int) -> tuple[Kind, bytes] | None:
    """The first message in it, taken out; None until all of it is there. Raises ValueError for one of more than `most`
    bytes, or of no kind."""
    if len(received) < HEADER.size:
        return None
    size, byte = HEADER.unpack_from(received)
    kind, end = kind_of(byte), HEADER.size + size
    if size > most:
        raise ValueError("a message that is too long")
    if len(received) < end:
        return None
    body = bytes(received[HEADER.size : end])
    del received[:end]
    return kind, body


def kind_of(byte: bytes) -> Kind:
    """Raises ValueError."""
    kind = _KINDS.get(byte)
    if kind is None:
        raise ValueError("a message of no kind")
    return kind


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
