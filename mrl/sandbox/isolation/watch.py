"""One execution as the supervisor sees it: descriptors in, deadline, messages, output, and what became of it."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import time
from typing import Any

from . import frames
from .program import MAX_MESSAGE, Program
from .sessions import PeerSession, Session

REAP_SECONDS = 10.0
CPU_SLACK = 0.9
"""RLIMIT_CPU counts in ticks, rusage exactly: a program that was ended by its limit may show a little less."""
DESCRIPTORS = 4  # that each child gets


class ServerLost(Exception):
    """The fork-server does not do its part."""


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
    programs = [Program(request["stdin"])]
    try:
        if request["peer"] is not None:
            programs.append(Program(""))
        launch(programs, request["limits"], requests)
        poller = select.poll()
        for fd in (requests.fileno(), control):
            poller.register(fd, select.POLLIN)
        for program in programs:
            for fd in (program.channel, program.stdout, program.stderr, program.handle):
                poller.register(fd, select.POLLIN)
        session = (Session if request["peer"] is None else PeerSession)(request, programs, poller)
        session.begin()
        stopped = follow(session, programs, poller, started + request["limits"]["wall_seconds"], requests, control)
        if stopped == "cancelled":
            return None
        wall = time.monotonic() - started
        for program in programs:
            program.kill()
        ends = ended(requests)
        for program in programs:
            drain(program, request["limits"]["output_bytes"])
        if stopped is None:
            for program in reversed(programs):  # what was said last, before it ended by itself
                session.on_messages(program)
        return observation(session, stopped, ends, wall)
    except (ServerLost, OSError) as error:
        return {"status": "sandbox_error", "detail": f"{type(error).__name__}: {error}"}
    finally:
        for program in programs:
            program.close()


def launch(programs: list[Program], limits: dict[str, Any], requests: socket.socket) -> None:
    """Have the server fork the children. Raises ServerLost."""
    fds = [fd for program in programs for fd in program.inner]
    count = DESCRIPTORS
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


def follow(
    session: Session, programs: list[Program], poller: Any, deadline: float, requests: socket.socket, control: int
) -> str | None:
    """Until it is over. Why it has to be stopped, or None when a child ended or the session did."""
    allowed = session.request["limits"]["output_bytes"]
    owners = {fd: program for program in programs for fd in (program.channel, program.stdout, program.stderr)}
    while session.outcome is None:
        left = deadline - time.monotonic()
        if left <= 0:
            return "timeout"
        gone = False
        for fd, events in poller.poll(int(left * 1000) + 1):
            if fd == control:
                return "cancelled"
            program = owners.get(fd)
            if program is None:  # a child's handle, or the server, which speaks when the children have ended
                gone = True
            elif fd == program.channel:
                if events & select.POLLOUT:
                    program.flush(poller)
                if events & ~select.POLLOUT:
                    if not program.read_channel():
                        program.hang_up(poller)
                    session.on_messages(program)
            elif not program.read_output(fd):
                poller.unregister(fd)
        if any(sum(map(len, program.output.values())) > allowed for program in programs):
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


def observation(session: Session, stopped: str | None, ends: list[dict[str, Any]], wall: float) -> dict[str, Any]:
    program, limits, end = session.program, session.request["limits"], ends[0]
    stdout, stderr = program.output[program.stdout], program.output[program.stderr]
    status, number = session.outcome, None
    if stopped is not None:
        status = stopped
    elif status is None and len(ends) > 1 and tester_fell(ends):
        status, session.detail = "protocol", "the tests could not be run to their end on what the program answered"
    elif status is None and os.WIFSIGNALED(end["status"]):
        number = os.WTERMSIG(end["status"])
        if number in (signal.SIGKILL, signal.SIGXCPU) and end["cpu"] >= limits["cpu_seconds"] * CPU_SLACK:
            status = "timeout"
        else:
            status = "killed" if number == signal.SIGKILL else "crashed"
    elif status is None:
        session.exit_code = os.WEXITSTATUS(end["status"])
        status = "done" if session.script and session.exit_code == 0 else "exited"
        if session.script and session.exception:
            status = "memory" if session.exception == "MemoryError" else "error"
    if status in ("done", "exited") and len(stdout) + len(stderr) > limits["output_bytes"]:
        status = "output_limit"
    return {
        "status": status,
        "detail": session.detail,
        "answers": session.answers,
        "blocks": session.blocks,
        "exception": session.exception,
        "stdout": stdout[: limits["output_bytes"]].decode("utf-8", "replace"),
        "stderr": stderr[: limits["output_bytes"]].decode("utf-8", "replace"),
        "exit_code": session.exit_code,
        "signal": number,
        "wall_seconds": wall,
        "cpu_seconds": sum(end["cpu"] for end in ends),
        "peak_memory_mb": end["peak_kb"] / 1024,
    }


def tester_fell(ends: list[dict[str, Any]]) -> bool:
    """Of two children that have both ended, whether the tester did so first: the other one was then killed by us."""
    program, tester = (end["status"] for end in ends)
    return program == signal.SIGKILL and tester != signal.SIGKILL
