"""What the processes of the sandbox say to each other: one table of messages, and how one travels.

A message is four bytes of length, one byte of kind, the body. Standard library only: this file is loaded inside too.
"""

from __future__ import annotations

import os
import struct
from enum import Enum

HEADER = struct.Struct(">IB")
MAX_MESSAGE = 64_000_000
"""Bytes of one message from a program to its judge."""


class Kind(Enum):
    """byte, sender, receiver. Client: the trainer's process. Slot: the supervisor. Program and judge are confined."""

    REQUEST = b"x", "client", "slot"
    READY = b"r", "slot", "client"
    NOT_READY = b"f", "slot", "client"
    OBSERVATION = b"o", "slot", "client"
    HELLO = b"h", "agent", "client"
    """Of a machine apart. There, REQUEST and OBSERVATION begin with eight bytes of number, and NOT_READY says that
    nothing will follow."""

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

    RESULT = b"B", "judge", "slot"
    """Of one test, each once, in order."""
    BROKEN = b"Z", "judge", "slot"
    """The program sent what no honest one sends. The judge's last message."""
    FAULT = b"F", "judge", "slot"
    """The tests could not be read, for a reason of ours: no program is judged. Instead of everything else."""
    END = b"D", "judge", "slot"
    """Every test that is Python has its result."""

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
        made._value_, made.byte = byte[0], byte
        return made


_KINDS = {kind.value: kind for kind in Kind}


class Closed(Exception):
    """The other side is gone."""


def pack(kind: Kind, body: bytes = b"") -> bytes:
    return HEADER.pack(len(body), kind.value) + body


def send(fd: int, kind: Kind, body: bytes = b"") -> None:
    """Blocking. Raises OSError."""
    write(fd, HEADER.pack(len(body), kind.value) + body)


def receive(fd: int) -> tuple[Kind, bytes]:
    """Blocking: the next message. Raises Closed, and ValueError for one that nobody sends."""
    size, value = HEADER.unpack(read_exactly(fd, HEADER.size))
    kind = _KINDS.get(value)
    if kind is None or size > MAX_MESSAGE:
        raise ValueError("a message that is none")
    return kind, read_exactly(fd, size)


def kind_of(value: int) -> Kind:
    """Raises ValueError."""
    kind = _KINDS.get(value)
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
