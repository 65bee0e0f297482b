"""The supervisor's side of one child: descriptors, what it sent, what it printed."""

from __future__ import annotations

import _socket  # `socket` wraps it, and asks the kernel again what it has just been told
import contextlib
import fcntl
import os
import select
import signal
from typing import Any, NamedTuple

from .. import protocol
from ..protocol import Kind

MAX_MESSAGE = 4_100_000
"""Bytes of one message to the supervisor: a report is at most `runner.MAX_REPORT`."""


class Ended(NamedTuple):
    """How a child ended."""

    status: int
    """As `wait` has it."""
    cpu: float
    """Seconds."""
    peak_kb: int


class Process:
    """The supervisor's side of one child: its channel, output pipes and what it sent."""

    def __init__(self, stdin: str, link: int | None = None, notes: bool = False) -> None:
        """link: the child's end of the way between a program and its judge; None for none. notes: it gets, instead of
        a stdin, a file to write down what nobody waits for."""
        self.output: dict[int, bytearray] = {}
        self.incoming = bytearray()
        self.outgoing = bytearray()
        self.handle, self.pid = -1, -1
        self.ended: Ended | None = None
        """How, once it is known."""
        self.counted = 0.0
        """Seconds of its processor time that were said to be a program's."""
        self.closed = False
        self.confined = False
        """Until then the child is ours, and what it says is."""
        self.socket, theirs = _socket.socketpair()
        self.channel = self.socket.fileno()
        self.stdout, stdout_inner = os.pipe2(os.O_CLOEXEC)
        self.stderr, stderr_inner = os.pipe2(os.O_CLOEXEC)
        first = os.memfd_create("notes", os.MFD_CLOEXEC) if notes else open_stdin(stdin)
        self.notes, self.noted = os.dup(first) if notes else -1, 0
        self.inner = [first, stdout_inner, stderr_inner, theirs.detach()]
        """Descriptors for the child: stdin, stdout, stderr, channel, link."""
        self.inner.append(link if link is not None else os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        self.output = {self.stdout: bytearray(), self.stderr: bytearray()}
        for fd in (self.channel, self.stdout, self.stderr):
            os.set_blocking(fd, False)

    def close_inner(self) -> None:
        while self.inner:
            os.close(self.inner.pop())

    def close(self) -> None:
        self.close_inner()
        self.socket.close()
        for fd in (self.stdout, self.stderr, self.handle, self.notes):
            if fd >= 0:
                os.close(fd)
        self.channel = self.stdout = self.stderr = self.handle = self.notes = -1

    def kill(self) -> None:
        if self.handle >= 0:
            with contextlib.suppress(ProcessLookupError):  # it ended by itself
                signal.pidfd_send_signal(self.handle, signal.SIGKILL)

    def watch(self, poller: Any) -> None:
        for fd in (self.channel, self.stdout, self.stderr, self.handle):
            poller.register(fd, select.POLLIN)

    def queue(self, kind: Kind, body: bytes, poller: Any) -> None:
        """Send without waiting for a child that does not read."""
        self.outgoing += protocol.pack(kind, body)
        self.flush(poller)

    def hand_over(self, kind: Kind, fd: int) -> None:
        """A message that brings a descriptor along, which is closed here. Nothing may be queued."""
        try:
            self.socket.sendmsg(
                [protocol.pack(kind)], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, protocol.DESCRIPTOR.pack(fd))]
            )
        finally:
            os.close(fd)

    def has_ended(self) -> bool:
        poller = select.poll()
        poller.register(self.handle, select.POLLIN)
        return bool(poller.poll(0))

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
        return bool(data)

    def next_message(self) -> tuple[Kind, bytes] | None:
        """Raises ValueError for one that is too long or of no kind."""
        return protocol.take(self.incoming, MAX_MESSAGE)

    def new_notes(self) -> list[bytes]:
        """The lines it has written down since the last time."""
        data = os.pread(self.notes, os.fstat(self.notes).st_size - self.noted, self.noted)
        whole = data.rfind(b"\n") + 1  # it may have been killed in the middle of a line
        self.noted += whole
        return data[:whole].splitlines()

    def forget_notes(self) -> None:
        os.ftruncate(self.notes, 0)
        self.noted = 0

    def drain(self, limit: int) -> None:
        """What is still in the pipes of a child that has ended."""
        for fd, data in self.output.items():
            before = -1
            while before < len(data) <= limit:
                before = len(data)
                self.read_output(fd)
        before = -1
        while before < len(self.incoming) <= MAX_MESSAGE:
            before = len(self.incoming)
            self.read_channel()

    def printed(self, limit: int) -> tuple[str, str]:
        """Stdout and stderr as text, cut."""
        out, error = (bytes(self.output[fd][:limit]).decode("utf-8", "replace") for fd in self.output)
        return out, error


def open_stdin(text: str) -> int:
    """A sealed file in memory: the program can neither change it nor wait for more."""
    fd = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    if text:
        protocol.write(fd, text.encode("utf-8", "surrogatepass"))
        os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 0xF)  # sealed, no shrinking, growing or writing
    return fd
