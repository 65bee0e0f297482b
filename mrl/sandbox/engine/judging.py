"""One program, judged: its processes, the time they have, and what is said of it.

The tests that are Python run in the judge's process, which asks the program's; every test of an output is a run of the
program as a script, whose stdout the same judge compares. They follow one another and share the time.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..protocol import Kind
from .process import Process

REAP_SECONDS = 10.0
CPU_SLACK = 0.5
"""RLIMIT_CPU counts whole ticks, rusage what ran: on a busy virtual machine a program ended by its limit shows less."""
JUDGING_SECONDS = 20.0
"""For comparing an output, on top of what is left of the program's time."""
MAX_USES = 100
"""Programs after which a judge is replaced by a new one."""
STDERR_TIMES = 16
"""How much more may go to stderr, which no test reads, than to stdout."""
NOT_REACHED = "not reached"
NO_TIME = "not run: the program's time was used up"
FELL = "the tests could not be run to their end on what the program answered"
REFUSED = "not judgeable here, because "


class ServerLost(Exception):
    """The fork-server does not do its part."""


class Cancelled(Exception):
    """The client went away."""


class NotRun(Exception):
    """A failure of ours: the program was not judged."""


@dataclass(slots=True)
class Kept:
    """A judge that waits for the next program with the same tests."""

    judge: Process | None = None
    key: bytes = b""
    uses: int = 0


def run(
    request: dict[str, Any], requests: socket.socket, control: int, unsafe: bool, kept: Kept
) -> dict[str, Any] | None:
    """Its observation. unsafe: programs can leave processes behind. None when the client went away meanwhile."""
    judging = Judging(request, requests, control, unsafe, kept)
    try:
        judging.all()
        return judging.observation()
    except (Cancelled, ServerLost, NotRun, OSError) as error:
        with contextlib.suppress(ServerLost, OSError):
            judging.end_orphans()
        if isinstance(error, Cancelled):
            return None
        return {"status": "sandbox_error", "detail": f"{type(error).__name__}: {error}"}
    finally:
        judging.close()


@dataclass(slots=True)
class Part:
    """The tests that are Python, or one run of a script: how it ended."""

    status: str
    detail: str = ""
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None
    signal: int | None = None


@dataclass(slots=True)
class Said:
    """What a program says of itself."""

    exception: str = ""
    memory: bool = False
    left: int | None = None


@dataclass
class Judging:
    request: dict[str, Any]
    server: socket.socket
    control: int
    unsafe: bool
    kept: Kept
    judge: Process | None = None
    program: Process | None = None
    said: Said = field(default_factory=Said)
    results: list[list[Any]] = field(default_factory=list)
    """Of each test: whether it passed, why not, a flag (`memory`, `refused`, `fault`)."""
    pending: list[int] = field(default_factory=list)
    """The tests whose results the judge owes, in order."""
    report: list[str | None] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    again: bool = False
    """The judge can go on with another program."""
    ended: bool = False
    """The judge is through with the tests that are Python."""
    broken: str = ""
    """How the program broke the protocol."""
    spoke: bool = False
    """It did so towards the supervisor."""
    wall: float = 0.0
    cpu: float = 0.0
    peak_kb: int = 0

    def all(self) -> None:
        """Raises ServerLost, Cancelled, NotRun, OSError."""
        tests = self.request["tests"]
        self.results = [[False, NOT_REACHED, ""] for _ in tests]
        python = [at for at, test in enumerate(tests) if isinstance(test, str)]
        if python:
            self.run_python(python)
        if not tests:
            self.run_script(None, self.request["stdin"], 0)
        for at, test in enumerate(tests):
            if isinstance(test, dict):
                self.run_script(at, test["input"], len(test["output"]))

    # --- the two kinds of runs

    def run_python(self, indices: list[int]) -> None:
        started = time.monotonic()
        first, second = (end.detach() for end in socket.socketpair())
        self.program = Process("", second)
        self.pending = list(indices)
        plan = self.plan(python=True)
        if self.take_kept(plan):
            self.launch([self.program])
        else:
            self.start_judge(first, beside=self.program)
        assert self.judge is not None
        poller = self.poller(self.judge, self.program)
        self.program.queue(Kind.PROGRAM, self.code(), poller)
        if self.kept.uses:
            self.judge.hand_over(Kind.NEXT, first)
        else:
            self.judge.queue(Kind.PLAN, plan, poller)
        stopped = self.follow(poller, self.deadline(), lambda: self.ended or bool(self.broken))
        self.wall += time.monotonic() - started
        part = self.conclude(stopped, asked=True)
        self.enter(part, indices)
        if not self.ended:
            self.end_judge()

    def run_script(self, at: int | None, stdin: str, expected: int) -> None:
        if self.left()["wall_seconds"] <= 0 or self.left()["cpu_seconds"] <= 0:
            part = Part("timeout", NO_TIME)
        else:
            started = time.monotonic()
            self.said, self.broken, self.spoke = Said(), "", False
            self.program = Process(stdin)
            self.launch([self.program])
            poller = self.poller(self.program)
            self.program.queue(Kind.SCRIPT, self.code(), poller)
            allowed = max(self.request["limits"]["output_bytes"], 2 * expected + 65536)
            stopped = self.follow(poller, self.deadline(), lambda: False, allowed)
            self.wall += time.monotonic() - started
            part = self.conclude(stopped, asked=False, at=at, allowed=allowed)
        if at is None:
            self.parts.append(part)
        else:
            if part.status != "done":
                self.results[at] = [False, part.detail, ""]
            self.enter(part, [at])

    def conclude(self, stopped: str | None, asked: bool, at: int | None = None, allowed: int = 0) -> Part:
        """How the program ended, once nothing of it runs any more; and, of a script, what its output is worth."""
        program, limits = self.program, self.request["limits"]
        assert program is not None
        fell = asked and self.judge is not None and self.judge.ended is not None and self.judge.ended["status"] != 0
        by_itself = program.ended is not None
        program.kill()
        end = self.reap(program)
        allowed = allowed or limits["output_bytes"]
        program.drain(allowed)
        if asked and self.judge is not None and not self.ended:
            self.judge.drain(limits["output_bytes"])
            self.take_messages(self.judge)
            fell = fell and not self.ended and not self.broken
        self.take_messages(program)
        stdout, stderr = program.printed(limits["output_bytes"])
        part = Part("done", "", stdout, stderr)
        if self.broken:
            part.status, part.detail = "protocol", self.broken
        elif stopped is not None:
            part.status = stopped
        elif self.ended and asked:
            pass
        elif fell and self.judge is not None and self.reap(self.judge)["cpu"] >= limits["cpu_seconds"] * CPU_SLACK:
            part.status = "timeout"
        elif fell:
            part.status, part.detail = "protocol", FELL
        elif os.WIFSIGNALED(end["status"]) and by_itself:
            part.signal = number = os.WTERMSIG(end["status"])
            if number in (signal.SIGKILL, signal.SIGXCPU) and end["cpu"] >= limits["cpu_seconds"] * CPU_SLACK:
                part.status = "timeout"
            else:
                part.status = "killed" if number == signal.SIGKILL else "crashed"
        else:
            part.exit_code = os.WEXITSTATUS(end["status"]) if by_itself else 0
            part.status = "exited" if asked or part.exit_code else "done"
            if self.said.memory:
                part.status = "memory"
            elif self.said.exception:
                part.status = "memory" if self.said.exception.startswith("MemoryError") else "error"
        if part.status in ("done", "exited") and len(program.output[program.stdout]) > allowed:
            part.status = "output_limit"
        if part.status == "done" and at is not None:
            self.judge_output(at, bytes(program.output[program.stdout]))
            if self.results[at][2] == "fell":
                part.status, part.detail = "protocol", self.results[at][1]
        part.detail = part.detail or self.explain(part)
        program.close()
        self.program = None
        return part

    def judge_output(self, at: int, output: bytes) -> None:
        if self.judge is None:
            self.start_judge(None)
            assert self.judge is not None
            self.judge.queue(Kind.PLAN, self.plan(python=False), self.poller(self.judge))
        number = sum(isinstance(test, dict) for test in self.request["tests"][:at])
        self.pending = [at]
        poller = self.poller(self.judge)
        self.judge.queue(Kind.OUTPUT, json.dumps([number, output.decode("utf-8", "replace")]).encode(), poller)
        self.follow(poller, time.monotonic() + JUDGING_SECONDS, lambda: not self.pending)
        if self.pending:
            self.results[at] = [False, "what was printed could not be compared", "fell"]
            self.end_judge()

    # --- processes

    def take_kept(self, plan: bytes) -> bool:
        """Whether the judge of the program before has the same tests, and goes on with them."""
        kept, key = self.kept, plan + json.dumps(self.request["limits"]).encode()
        self.judge, kept.judge = kept.judge, None
        same = kept.key == key and kept.uses < MAX_USES and self.judge is not None and not self.judge.has_ended()
        if same and self.judge is not None:  # its processor time has one limit for all programs
            same = self.judge.counted < self.request["limits"]["cpu_seconds"] / 4
        if not same:
            self.end_judge()
        kept.key, kept.uses = key, kept.uses + 1 if same else 0
        return same

    def keep_or_end_judge(self) -> None:
        judge = self.judge
        if judge is None or not (self.again and self.ended and not self.unsafe):
            return self.end_judge()
        for data in judge.output.values():
            data.clear()
        self.kept.judge, self.judge = judge, None
        return None

    def start_judge(self, link: int | None, beside: Process | None = None) -> None:
        self.judge = Process("", link)
        self.launch([self.judge] if beside is None else [self.judge, beside])

    def launch(self, processes: list[Process]) -> None:
        """Have the server fork the children. Raises ServerLost."""
        fds = [fd for process in processes for fd in process.inner]
        each = len(processes[0].inner)
        children = [list(range(k * each, (k + 1) * each)) for k in range(len(processes))]
        limits = {**self.request["limits"], **self.left()}
        judges = processes[0] is self.judge
        message = {"limits": limits, "children": children, "judges": judges}
        socket.send_fds(self.server, [json.dumps(message).encode()], fds)
        for process in processes:
            process.close_inner()
        self.server.settimeout(REAP_SECONDS)
        try:
            said, handles, _, _ = socket.recv_fds(self.server, 4096, len(processes))
        except TimeoutError:
            raise ServerLost("the server did not start a program") from None
        if len(handles) != len(processes):
            raise ServerLost(f"the server could not start a program: {said.decode(errors='replace')[:200]}")
        for process, handle, pid in zip(processes, handles, json.loads(said), strict=True):
            process.handle, process.pid = handle, pid

    def reap(self, process: Process) -> dict[str, Any]:
        """How it ended, which it has or is about to. Raises ServerLost."""
        if process.ended is None:
            (process.ended,) = self.tell({"reap": [process.pid], "last": False})
            assert process.ended is not None
            self.cpu += process.ended["cpu"] - process.counted
            if process is not self.judge:
                self.peak_kb = max(self.peak_kb, process.ended["peak_kb"])
        return process.ended

    def tell(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        self.server.send(json.dumps(message).encode())
        try:
            data = self.server.recv(65536)
        except TimeoutError:
            raise ServerLost("a program could not be ended") from None
        if not data:
            raise ServerLost("the server is gone")
        said: list[dict[str, Any]] = json.loads(data)
        return said

    def end_judge(self) -> None:
        if self.judge is not None:
            self.judge.kill()
            self.reap(self.judge)
            self.judge.close()
            self.judge = None

    def end_orphans(self) -> None:
        if self.unsafe:
            self.tell({"reap": [], "last": True})

    def close(self) -> None:
        for process in (self.program, self.judge):
            if process is not None:
                process.kill()
                process.close()

    # --- following

    def poller(self, *processes: Process) -> Any:
        poller = select.poll()
        poller.register(self.server.fileno(), select.POLLIN)
        poller.register(self.control, select.POLLIN)
        for process in processes:
            process.watch(poller)
        return poller

    def follow(self, poller: Any, deadline: float, over: Callable[[], bool], allowed: int = 0) -> str | None:
        """Until it is over, or the children have ended. Why it has to be stopped, or None. Raises ServerLost,
        Cancelled, NotRun."""
        live = [process for process in (self.judge, self.program) if process is not None and process.ended is None]
        owners = {fd: p for p in live for fd in (p.channel, p.stdout, p.stderr, p.handle)}
        allowed = allowed or self.request["limits"]["output_bytes"]
        while not over():
            left = deadline - time.monotonic()
            if left <= 0:
                return "timeout"
            for fd, events in poller.poll(int(left * 1000) + 1):
                process = owners.get(fd)
                if process is None:
                    if fd == self.control:
                        raise Cancelled
                    raise ServerLost("the server is gone")
                if fd == process.handle:
                    poller.unregister(fd)
                    self.reap(process)
                    if process is self.judge or self.judge is None or not self.asking():
                        process.drain(allowed)
                        self.take_messages(process)
                        if process is not self.judge or process.ended is None or process.ended["status"] != 0:
                            return None
                    if self.all_ended():
                        return None
                elif fd == process.channel:
                    if events & select.POLLOUT:
                        process.flush(poller)
                    if events & ~select.POLLOUT:
                        if not process.read_channel():
                            process.hang_up(poller)
                        self.take_messages(process)
                elif not process.read_output(fd):
                    poller.unregister(fd)
                elif fd == process.stderr:
                    if len(process.output[fd]) > STDERR_TIMES * allowed:
                        return "output_limit"
                elif len(process.output[fd]) > allowed:
                    return "output_limit"
        return None

    def asking(self) -> bool:
        """Whether a judge asks the program that runs."""
        return self.judge is not None and self.program is not None and not self.ended

    def all_ended(self) -> bool:
        return all(process is None or process.ended is not None for process in (self.judge, self.program))

    def take_messages(self, process: Process) -> None:
        """Raises NotRun."""
        while True:
            try:
                message = process.next_message()
                if message is None:
                    return
                if not process.confined:
                    self.on_start(process, *message)
                elif process is self.judge:
                    self.on_judge(*message)
                else:
                    self.on_program(*message)
            except ValueError as error:
                if process is self.judge or not process.confined:
                    raise NotRun(f"the judge broke its protocol: {error}") from None
                self.broken, self.spoke = self.broken or "a message too long, or one that cannot be read", True
                process.incoming.clear()
                return

    def on_start(self, process: Process, kind: Kind, body: bytes) -> None:
        """The child's first message, written before it read the program. Later ones can be the program's own."""
        process.confined = kind is Kind.CONFINED
        if not process.confined:
            reason = body.decode("ascii", "replace") if kind is Kind.NOT_CONFINED else "a child broke its protocol"
            raise NotRun(reason)

    def on_program(self, kind: Kind, body: bytes) -> None:
        """Raises ValueError."""
        if kind is Kind.ERROR and not self.said.exception:
            self.said.exception = body.decode("ascii")[:2000]
        elif kind is Kind.MEMORY:
            self.said.memory = True
        elif kind is Kind.LEFT:
            self.said.left = int(body) & 0xFF
        else:
            raise ValueError("a message out of turn")

    def on_judge(self, kind: Kind, body: bytes) -> None:
        if kind is Kind.RESULT and self.pending:
            passed, detail, flag = json.loads(body)
            self.results[self.pending.pop(0)] = [passed, detail, flag]
            if flag == "fault":
                raise NotRun(f"a mistake of the judge's own: {detail}")
        elif kind is Kind.FAULT:
            raise NotRun(f"the tests could not be read: {body.decode('ascii')}")
        elif kind is Kind.END:
            said = json.loads(body)
            self.ended, self.again = True, self.again or said["again"]
            self.report = self.report or said["report"]
            assert self.judge is not None
            self.cpu += said["cpu"] - self.judge.counted
            self.judge.counted = said["cpu"]
        elif kind is Kind.BROKEN:
            self.broken = body.decode("ascii")
        else:
            raise ValueError("a message out of turn")

    # --- what it comes to

    def left(self) -> dict[str, float]:
        limits = self.request["limits"]
        return {"wall_seconds": limits["wall_seconds"] - self.wall, "cpu_seconds": limits["cpu_seconds"] - self.cpu}

    def deadline(self) -> float:
        return time.monotonic() + self.left()["wall_seconds"]

    def code(self) -> bytes:
        code: str = self.request["code"]
        return code.encode("utf-8", "surrogatepass")

    def plan(self, python: bool) -> bytes:
        """What the judge is told. python: whether it runs those tests, or only compares outputs."""
        tests = self.request["tests"]
        plan = {
            "tests": [test for test in tests if isinstance(test, str)] if python else [],
            "outputs": [[t["compare"], t["tolerance"], t["output"]] for t in tests if isinstance(t, dict)],
            "report": self.request["report"],
        }
        return json.dumps(plan).encode()

    def enter(self, part: Part, indices: Sequence[int]) -> None:
        """What the part means for the program as a whole."""
        if self.spoke:  # out of turn: nothing of this run counts
            for at in indices:
                self.results[at] = [False, part.detail, ""]
        failed = next((at for at in indices if not self.results[at][0]), None)
        limit = self.request["limits"]["memory_mb"]
        refused = next((at for at in indices if self.results[at][2] == "refused"), None)
        if refused is not None and part.status == "done":
            part.status, part.detail = "unjudgeable", f"test {refused}: {REFUSED}{self.results[refused][1]}"
        elif part.status == "done" and failed is None:
            part.status = "passed"
        elif part.status == "done" and any(self.results[at][2] == "memory" for at in indices):
            part.status, part.detail = "memory", f"MemoryError (limit {limit} MB)"
        elif part.status == "done":
            part.status, part.detail = "failed", f"test {failed}: {self.results[failed or 0][1]}"
        self.parts.append(part)

    def explain(self, part: Part) -> str:
        """One line on what ended it, for the log."""
        limits = self.request["limits"]
        texts = {
            "error": self.said.exception,
            "timeout": f"no end after {limits['wall_seconds']:g} s, or more than {limits['cpu_seconds']:g} s of"
            " processor time",
            "memory": f"out of memory (limit {limits['memory_mb']} MB)",
            "crashed": f"signal {part.signal}",
            "killed": f"signal {part.signal}",
            "exited": f"left with exit code {part.exit_code} before the tests were done",
            "output_limit": f"more than {limits['output_bytes']} bytes of output",
            "protocol": "what came back could not be read",
        }
        return texts.get(part.status, "")

    def observation(self) -> dict[str, Any]:
        """Status and output of the first part that did not pass."""
        self.keep_or_end_judge()
        self.end_orphans()
        worst = next((part for part in self.parts if part.status not in ("passed", "done")), self.parts[-1])
        status = "passed" if worst.status == "done" else worst.status
        return {
            "status": status,
            "detail": worst.detail,
            "tests": [[passed, detail] for passed, detail, _ in self.results],
            "report": self.report,
            "stdout": worst.stdout,
            "stderr": worst.stderr,
            "exit_code": worst.exit_code,
            "signal": worst.signal,
            "wall_seconds": self.wall,
            "cpu_seconds": self.cpu,
            "peak_memory_mb": self.peak_kb / 1024,
        }
