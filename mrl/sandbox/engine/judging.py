"""One program, judged: its processes, the time they have, and what is said of it.

The tests that are Python run in the judge's process, which asks the program's; every test of an output is a run of the
program as a script, whose stdout the same judge compares. They follow one another and share the time.
"""

from __future__ import annotations

import _socket
import contextlib
import os
import select
import signal
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .. import protocol
from ..protocol import BOTH, ENDED, JUDGE, LAUNCH, PROGRAM, REAP, STARTED, Datagram, Kind
from .process import Ended, Process

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
    """What waits for the next request: a judge, for a program with the same tests, and a process for the program."""

    request: dict[str, Any] = field(default_factory=dict)
    """The last one."""
    judge: Process | None = None
    uses: int = 0
    spare: Process | None = None
    link: int = -1
    """The judge's end of the spare process's link."""

    def fits(self, request: dict[str, Any], *keys: str) -> bool:
        return all(self.request.get(key) == request[key] for key in keys)


def run(
    request: dict[str, Any], requests: _socket.socket, control: int, unsafe: bool, kept: Kept
) -> dict[str, Any] | None:
    """Its observation. unsafe: programs can leave processes behind. None when the client went away meanwhile."""
    judging = Judging(request, requests, control, unsafe, kept)
    try:
        judging.all()
        kept.request = request
        return judging.observation()
    except (Cancelled, ServerLost, NotRun, OSError) as error:
        with contextlib.suppress(ServerLost, OSError):
            judging.end_orphans()
        if isinstance(error, Cancelled):
            return None
        return {"status": "sandbox_error", "detail": f"{type(error).__name__}: {error}"}
    finally:
        judging.close()


def prepare(request: dict[str, Any], requests: _socket.socket, control: int, kept: Kept) -> None:
    """Have a process forked and confined for a program that comes next, which will likely have the limits of the last.
    A failure shows when it is needed."""
    if any(isinstance(test, str) for test in request["tests"]):
        with contextlib.suppress(ServerLost, OSError):
            Judging(request, requests, control, False, kept).make_spare()


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
    server: _socket.socket
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
        spare = self.kept.spare
        if spare is not None and (spare.has_ended() or not self.kept.fits(self.request, "limits")):
            self.end_spare(spare)
        self.results = [[False, NOT_REACHED, ""] for _ in tests]
        python = [at for at, test in enumerate(tests) if isinstance(test, str)]
        if python:
            self.run_python(python)
        elif self.kept.spare is not None:
            self.end_spare(self.kept.spare)
        if not tests:
            self.run_script(None, self.request["stdin"], 0)
        for at, test in enumerate(tests):
            if isinstance(test, dict):
                self.run_script(at, test["input"], len(test["output"]))

    # --- the two kinds of runs

    def run_python(self, indices: list[int]) -> None:
        started = time.monotonic()
        self.pending = list(indices)
        new: list[Process] = []
        self.program, self.kept.spare, first = self.kept.spare, None, self.kept.link
        if self.program is None:
            self.program, first = new_program()
            new = [self.program]
        if not self.take_kept():
            self.judge = Process("", first, notes=True)
            new.insert(0, self.judge)
        assert self.judge is not None
        if new:
            self.launch(*new)
        poller = self.poller(self.judge, self.program)
        self.program.queue(Kind.PROGRAM, self.code(), poller)
        if self.kept.uses:
            self.judge.hand_over(Kind.NEXT, first)
        else:
            self.judge.queue(Kind.PLAN, self.plan(python=True), poller)
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
            self.launch(self.program)
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
        fell = asked and self.judge is not None and self.judge.ended is not None and self.judge.ended.status != 0
        by_itself = program.ended is not None
        program.kill()
        end = self.reap(program)
        allowed = allowed or limits["output_bytes"]
        program.drain(allowed)
        if asked and self.judge is not None and not self.ended:
            self.judge.drain(limits["output_bytes"])
            self.take_messages(self.judge)
            self.take_results(self.judge)
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
        elif fell and self.judge is not None and self.reap(self.judge).cpu >= limits["cpu_seconds"] * CPU_SLACK:
            part.status = "timeout"
        elif fell:
            part.status, part.detail = "protocol", FELL
        elif os.WIFSIGNALED(end.status) and by_itself:
            part.signal = number = os.WTERMSIG(end.status)
            if number in (signal.SIGKILL, signal.SIGXCPU) and end.cpu >= limits["cpu_seconds"] * CPU_SLACK:
                part.status = "timeout"
            else:
                part.status = "killed" if number == signal.SIGKILL else "crashed"
        else:
            part.exit_code = os.WEXITSTATUS(end.status) if by_itself else 0
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
            self.judge = Process("", notes=True)
            self.launch(self.judge)
            self.judge.queue(Kind.PLAN, self.plan(python=False), self.poller(self.judge))
        number = sum(isinstance(test, dict) for test in self.request["tests"][:at])
        self.pending = [at]
        poller = self.poller(self.judge)
        self.judge.queue(Kind.OUTPUT, protocol.dump([number, output.decode("utf-8", "replace")]), poller)
        self.follow(poller, time.monotonic() + JUDGING_SECONDS, lambda: not self.pending)
        if self.pending:
            self.results[at] = [False, "what was printed could not be compared", "fell"]
            self.end_judge()

    # --- processes

    def take_kept(self) -> bool:
        """Whether the judge of the program before has the same tests, and goes on with them."""
        kept = self.kept
        self.judge, kept.judge = kept.judge, None
        same = self.judge is not None and not self.judge.has_ended() and kept.uses < MAX_USES
        if same and self.judge is not None:  # its processor time has one limit for all programs
            same = self.judge.counted < self.request["limits"]["cpu_seconds"] / 4
        same = same and kept.fits(self.request, "tests", "report", "limits")
        if not same:
            self.end_judge()
        kept.uses = kept.uses + 1 if same else 0
        return same

    def make_spare(self) -> None:
        spare, link = new_program()
        self.launch(spare)  # where that fails the server is gone, and with it this process
        self.kept.spare, self.kept.link = spare, link

    def end_spare(self, spare: Process) -> None:
        self.kept.spare = None
        os.close(self.kept.link)
        spare.kill()
        self.tell(spare.pid)
        spare.close()

    def keep_or_end_judge(self) -> None:
        judge = self.judge
        if judge is None or not (self.again and self.ended and not self.unsafe):
            return self.end_judge()
        for data in judge.output.values():
            data.clear()
        judge.forget_notes()
        self.kept.judge, self.judge = judge, None
        return None

    def launch(self, *processes: Process) -> None:
        """Have the server fork the children, a judge first. Raises ServerLost."""
        what = BOTH if len(processes) == 2 else JUDGE if processes[0] is self.judge else PROGRAM
        limits, left = self.request["limits"], self.left()
        numbers = (int(limits[name]) for name in ("file_mb", "memory_mb", "open_files", "processes"))
        message = LAUNCH.pack(what, left["cpu_seconds"], *numbers)
        inner = array("i", (fd for process in processes for fd in process.inner))
        self.server.sendmsg([message], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, inner)])
        for process in processes:
            process.close_inner()
        for process in processes:
            (process.pid,), rights = self.hear(STARTED)
            (process.handle,) = protocol.DESCRIPTOR.unpack(rights[0][2])

    def reap(self, process: Process) -> Ended:
        """How it ended, which it has or is about to. Raises ServerLost."""
        if process.ended is None:
            process.ended = self.tell(process.pid)
            self.cpu += process.ended.cpu - process.counted
            if process is not self.judge:
                self.peak_kb = max(self.peak_kb, process.ended.peak_kb)
        return process.ended

    def tell(self, pid: int, last: bool = False) -> Ended:
        self.server.send(REAP.pack(pid, last))
        return Ended(*self.hear(ENDED)[0])

    def hear(self, what: Datagram) -> tuple[tuple[Any, ...], list[Any]]:
        """Numbers, and descriptors. Raises ServerLost."""
        try:
            said, rights, _, _ = self.server.recvmsg(1000, _socket.CMSG_SPACE(4))
            return what.unpack(said), rights
        except TimeoutError:
            raise ServerLost("the server does not answer") from None
        except ValueError as error:
            raise ServerLost(f"the server did not do its part: {error}") from None

    def end_judge(self) -> None:
        if self.judge is not None:
            self.judge.kill()
            self.reap(self.judge)
            self.judge.close()
            self.judge = None

    def end_orphans(self) -> None:
        if self.unsafe:
            self.tell(0, last=True)

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
                        if process is not self.judge or process.ended is None or process.ended.status != 0:
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

    def take_results(self, judge: Process) -> None:
        """Those it has written down. Raises NotRun."""
        for line in judge.new_notes():
            try:
                passed, detail, flag = protocol.parse(line)
                self.results[self.pending.pop(0)] = [passed, detail, flag]
            except (ValueError, TypeError, IndexError):
                raise NotRun("the judge broke its protocol: a note that is none") from None
            if flag == "fault":
                raise NotRun(f"a mistake of the judge's own: {detail}")

    def on_judge(self, kind: Kind, body: bytes) -> None:
        if kind is Kind.COMPARED and self.pending:
            self.results[self.pending.pop(0)] = protocol.parse(body)
        elif kind is Kind.FAULT:
            raise NotRun(f"the tests could not be read: {body.decode('ascii')}")
        elif kind is Kind.END:
            said = protocol.parse(body)
            assert self.judge is not None
            self.take_results(self.judge)
            self.ended, self.again = True, self.again or said["again"]
            self.report = self.report or said["report"]
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
        return protocol.dump(plan)

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
        if part.status == "done":
            return ""
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


def new_program() -> tuple[Process, int]:
    """For a program that will be asked, and the judge's end of the link to it."""
    first, second = (end.detach() for end in _socket.socketpair())
    return Process("", second), first
