"""One execution as the supervisor sees it: descriptors in, deadline, messages, output, and what became of it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import socket
import time
from typing import Any

from . import frames

MAX_MESSAGE = 4_100_000
"""Bytes of one message from a program; a value is at most `plain.MAX_BYTES`."""
MAX_MESSAGES_TOTAL = 32_000_000
REAP_SECONDS = 10.0
FIXED = "stdin stdout stderr channel".split()


class ServerLost(Exception):
    """The fork-server does not do its part."""


class Program:
    """The supervisor's side of one child: its channel, output pipes and what it sent."""

    def __init__(self, stdin: str) -> None:
        self.inner: list[int] = []
        """Descriptors for the child: stdin, stdout, stderr, channel."""
        self.channel, self.stdout, self.stderr = -1, -1, -1
        self.output: dict[int, bytearray] = {}
        self.incoming = bytearray()
        self.outgoing = b""
        self.received = 0
        self.handle = -1
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

    def flush(self, poller: Any) -> None:
        try:
            done = os.write(self.channel, self.outgoing)
        except BlockingIOError:
            done = 0
        except OSError:  # it closed its end: that shows when we read
            done = len(self.outgoing)
        self.outgoing = self.outgoing[done:]
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


class Session:
    """Drives the program through its execution. `outcome` is set once it is over."""

    def __init__(self, request: dict[str, Any], program: Program, poller: Any) -> None:
        self.request, self.program, self.poller = request, program, poller
        self.calls = request["calls"]
        self.script = not self.calls and not request["load"]
        self.answers: list[list[str]] = []
        self.token = b""
        self.loaded = False
        self.outcome: str | None = None
        self.detail = ""
        self.exit_code: int | None = None
        self.exception = ""

    def begin(self) -> None:
        code = self.request["code"].encode("utf-8", "surrogatepass")
        self.program.queue(frames.pack(b"s" if self.script else b"c", code), self.poller)

    def on_messages(self) -> None:
        while self.outcome is None:
            try:
                message = self.program.next_message()
            except ValueError:
                self.outcome, self.detail = "protocol", "a message too long"
                return
            if message is None:
                return
            try:
                self.on_message(*message)
            except (ValueError, UnicodeDecodeError):
                self.outcome, self.detail = "protocol", "a message that cannot be read"

    def on_message(self, kind: bytes, body: bytes) -> None:
        if kind == b"E":
            self.exception = body.decode("ascii")[:2000]
            if not self.script:
                self.outcome = "error"
        elif kind == b"M":
            self.exception = "MemoryError"
            if not self.script:
                self.outcome = "memory"
        elif kind == b"S":
            self.outcome, self.detail = "sandbox_error", body.decode("ascii")
        elif kind == b"R" and not self.loaded and not self.script:
            self.loaded = True
            self.ask()
        elif kind == b"Q" and not self.script:
            number = body[len(self.token) :] if self.loaded else body
            self.outcome, self.exit_code = "exited", int(number) & 0xFF
        elif kind in (b"V", b"X") and self.token and body.startswith(self.token):
            self.answers.append([kind.decode(), body[len(self.token) :].decode("ascii")])
            self.token = b""
            self.ask()
        else:
            self.outcome, self.detail = "protocol", "an answer to nothing that was asked"

    def ask(self) -> None:
        """The next call, whose arguments nobody inside has seen before; or the end."""
        if self.program.incoming:
            self.outcome, self.detail = "protocol", "an answer before the question"
        elif len(self.answers) == len(self.calls):
            self.outcome = "done"
        else:
            self.token = secrets.token_hex(8).encode()
            call = dict(self.calls[len(self.answers)], id=self.token.decode())
            self.program.queue(frames.pack(b"q", json.dumps(call).encode()), self.poller)


def wait_for_request(control: int, requests: socket.socket, parent: int) -> dict[str, Any] | None:
    """None when it is time to end: the client or the server is gone."""
    poller = select.poll()
    poller.register(control, select.POLLIN)
    poller.register(requests, select.POLLIN)
    while True:
        for fd, _ in poller.poll(2000):
            if fd != control:  # the server speaks only when spoken to
                return None
            try:
                return json.loads(frames.read(control)[1])
            except (frames.Closed, OSError):
                return None
        if os.getppid() != parent:  # the parent is gone, though somebody still holds its end of the socket
            return None


def run(request: dict[str, Any], requests: socket.socket, control: int) -> dict[str, Any] | None:
    """Its observation. None when the client went away meanwhile."""
    started = time.monotonic()
    program = Program(request["stdin"])
    try:
        launch([program], request["limits"], requests)
        poller = select.poll()
        for fd in (program.channel, program.stdout, program.stderr, program.handle, requests.fileno(), control):
            poller.register(fd, select.POLLIN)
        session = Session(request, program, poller)
        session.begin()
        stopped = follow(session, poller, started + request["limits"]["wall_seconds"], requests, control)
        if stopped == "cancelled":
            return None
        wall = time.monotonic() - started
        program.kill()
        (end,) = ended(requests)
        drain(program, request["limits"]["output_bytes"])
        session.on_messages()  # what it said last, before it ended by itself
        return observation(session, stopped, end, wall)
    except (ServerLost, OSError) as error:
        return {"status": "sandbox_error", "detail": f"{type(error).__name__}: {error}"}
    finally:
        program.close()


def launch(programs: list[Program], limits: dict[str, Any], requests: socket.socket) -> None:
    """Have the server fork the children. Raises ServerLost."""
    fds = [fd for program in programs for fd in program.inner]
    count = len(FIXED)
    children = [{"fds": list(range(at * count, (at + 1) * count))} for at in range(len(programs))]
    socket.send_fds(requests, [json.dumps({"limits": limits, "children": children}).encode()], fds)
    for program in programs:
        program.close_inner()
    requests.settimeout(REAP_SECONDS)
    try:
        said, handles, _, _ = socket.recv_fds(requests, 4096, len(programs))
    except TimeoutError:
        raise ServerLost("the server did not start a program") from None
    if said != b"started" or len(handles) != len(programs):
        raise ServerLost(f"the server could not start a program: {said.decode(errors='replace')}")
    for program, handle in zip(programs, handles, strict=True):
        program.handle = handle


def follow(session: Session, poller: Any, deadline: float, requests: socket.socket, control: int) -> str | None:
    """Until it is over. Why it has to be stopped, or None when the child ended or the session did."""
    program = session.program
    allowed = session.request["limits"]["output_bytes"]
    while session.outcome is None:
        left = deadline - time.monotonic()
        if left <= 0:
            return "timeout"
        gone = False
        for fd, events in poller.poll(int(left * 1000) + 1):
            if fd == control:
                return "cancelled"
            if fd == program.channel:
                if events & select.POLLOUT:
                    program.flush(poller)
                if events & ~select.POLLOUT:
                    if not program.read_channel():
                        poller.unregister(fd)
                    session.on_messages()
            elif fd in program.output:
                if not program.read_output(fd):
                    poller.unregister(fd)
            else:  # the child's handle, or the server, which speaks when the child has ended
                gone = True
        if len(program.output[program.stdout]) + len(program.output[program.stderr]) > allowed:
            return "output_limit"
        if gone:
            return None
    return None


def ended(requests: socket.socket) -> list[dict[str, Any]]:
    """How the children ended, once all have. Raises ServerLost."""
    try:
        data = requests.recv(65536)
    except TimeoutError:
        raise ServerLost("a program could not be ended") from None
    if not data:
        raise ServerLost("the server is gone")
    return json.loads(data)


def drain(program: Program, limit: int) -> None:
    """What is still in the pipes of a child that has ended."""
    for fd, data in program.output.items():
        before = -1
        while before < len(data) <= limit:
            before = len(data)
            program.read_output(fd)
    before = -1
    while before < len(program.incoming) <= MAX_MESSAGE:
        before = len(program.incoming)
        program.read_channel()


def observation(session: Session, stopped: str | None, end: dict[str, Any], wall: float) -> dict[str, Any]:
    program, limits = session.program, session.request["limits"]
    stdout, stderr = program.output[program.stdout], program.output[program.stderr]
    status, number = session.outcome, None
    if stopped is not None:
        status = stopped
    elif status is None and os.WIFSIGNALED(end["status"]):
        number = os.WTERMSIG(end["status"])
        if number in (signal.SIGKILL, signal.SIGXCPU) and end["cpu"] >= limits["cpu_seconds"] * 0.98:
            status = "timeout"
        else:
            status = "killed" if number == signal.SIGKILL else "crashed"
    elif status is None:
        session.exit_code = os.WEXITSTATUS(end["status"])
        status = "exited" if not session.script else "done"
        if session.script and session.exception:
            status = "memory" if session.exception == "MemoryError" else "error"
    if status in ("done", "exited") and len(stdout) + len(stderr) > limits["output_bytes"]:
        status = "output_limit"
    return {
        "status": status,
        "detail": session.detail,
        "answers": session.answers,
        "exception": session.exception,
        "stdout": stdout[: limits["output_bytes"]].decode("utf-8", "replace"),
        "stderr": stderr[: limits["output_bytes"]].decode("utf-8", "replace"),
        "exit_code": session.exit_code,
        "signal": number,
        "wall_seconds": wall,
        "cpu_seconds": end["cpu"],
        "peak_memory_mb": end["peak_kb"] / 1024,
    }


def open_stdin(text: str) -> int:
    """A sealed file in memory: the program can neither change it nor wait for more."""
    import fcntl

    fd = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    if text:
        frames.write(fd, text.encode("utf-8", "surrogatepass"))
        os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 0xF)  # sealed, no shrinking, growing or writing
    return fd
