"""The supervisor's side of one child: descriptors, what it sent, what it printed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import socket
from typing import Any

from . import frames

MAX_MESSAGE = 4_100_000
"""Bytes of one message from a program; a value is at most `plain.MAX_BYTES`."""
MAX_MESSAGES_TOTAL = 32_000_000


class Program:
    """The supervisor's side of one child: its channel, output pipes and what it sent."""

    def __init__(self, stdin: str) -> None:
        self.inner: list[int] = []
        """Descriptors for the child: stdin, stdout, stderr, channel."""
        self.channel, self.stdout, self.stderr = -1, -1, -1
        self.output: dict[int, bytearray] = {}
        self.incoming = bytearray()
        self.outgoing = bytearray()
        self.received = 0
        self.handle = -1
        self.closed = False
        self.confined = False
        """Until then the child is ours, and what it says is."""
        ours, theirs = socket.socketpair()
        self.channel = ours.detach()
        self.stdout, stdout_inner = os.pipe2(os.O_CLOEXEC)
        self.stderr, stderr_inner = os.pipe2(os.O_CLOEXEC)
        self.inner = [open_stdin(stdin), stdout_inner, stderr_inner, theirs.detach()]
        self.output = {self.stdout: bytearray(), self.stderr: bytearray()}
        for fd in (self.channel, self.stdout, self.stderr):
            os.set_blocking(fd, False)

    def close_inner(self) -> None:
        while self.inner:
            os.close(self.inner.pop())

    def close(self) -> None:
        self.close_inner()
        for fd in (self.channel, self.stdout, self.stderr, self.handle):
            if fd >= 0:
                os.close(fd)

    def kill(self) -> None:
        if self.handle >= 0:
            with contextlib.suppress(ProcessLookupError):  # it ended by itself
                signal.pidfd_send_signal(self.handle, signal.SIGKILL)

    def queue(self, data: bytes, poller: Any) -> None:
        """Send without waiting for a program that does not read."""
        self.outgoing += data
        self.flush(poller)

    def hang_up(self, poller: Any) -> None:
        """It closed its end; what it still does shows in how it ends."""
        poller.unregister(self.channel)
        self.closed, self.outgoing = True, bytearray()

    def flush(self, poller: Any) -> None:
        if self.closed:
            return
        try:
            done = os.write(self.channel, self.outgoing)
        except BlockingIOError:
            done = 0
        except OSError:  # it closed its end: that shows when we read
            done = len(self.outgoing)
        del self.outgoing[:done]  # in a bytearray that takes no time: a program may read slowly, and have much sent
        poller.modify(self.channel, select.POLLIN | select.POLLOUT if self.outgoing else select.POLLIN)

    def read_output(self, fd: int) -> bool:
        """What is there, at most 64 KiB. False at the end."""
        try:
            data = os.read(fd, 65536)
        except BlockingIOError:
            return True
        self.output[fd] += data
        return bool(data)

    def read_channel(self) -> bool:
        try:
            data = os.read(self.channel, 1 << 18)
        except BlockingIOError:
            return True
        except ConnectionError:
            return False
        self.incoming += data
        self.received += len(data)
        return bool(data)

    def next_message(self) -> tuple[bytes, bytes] | None:
        """Raises ValueError for one that is too long."""
        if len(self.incoming) < frames.HEADER.size:
            return None
        size, kind = frames.HEADER.unpack_from(self.incoming)
        if size > MAX_MESSAGE or self.received > MAX_MESSAGES_TOTAL:
            raise ValueError
        end = frames.HEADER.size + size
        if len(self.incoming) < end:
            return None
        body = bytes(self.incoming[frames.HEADER.size : end])
        del self.incoming[:end]
        return bytes([kind]), body


def open_stdin(text: str) -> int:
    """A sealed file in memory: the program can neither change it nor wait for more."""
    fd = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    if text:
        frames.write(fd, text.encode("utf-8", "surrogatepass"))
        os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 0xF)  # sealed, no shrinking, growing or writing
    return fd
