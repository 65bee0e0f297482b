"""The first sandbox: each program in its own process group on this machine, with limits."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import secrets
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from mrl.errors import SandboxError
from mrl.sandbox._verdict import Run, merge_runs, not_judged, run_from_report
from mrl.sandbox.base import IOTest, Limits, Program, Verdict

GRACE_SECONDS = 20.0
"""How long past a program's deadline its supervisor may take to answer before it is given up."""


class ProcessSandbox:
    """Programs as processes of this machine, `slots` at a time.

    Each runs in a fork of a bare interpreter (`python -s -S`: the standard library, no site-packages; hash seed 0, so
    that it does the same thing every time), in its own session, within its `Limits`, with no environment, a scratch
    directory that is deleted afterwards, and /dev/null or the test's input as stdin. When it ends, or at its deadline,
    everything that descended from it is killed, also what left its process group (Linux). Memory is counted on top of
    the interpreter's own. When mrl runs as root, programs get an unused user id instead: they can signal nothing else,
    write only here and in folders open to everyone, and `processes` is exact; otherwise it only stops fork bombs.

    Assert tests run in the program's process, one after another, and each reports as it ends. Every `IOTest` is a run
    of its own that gets what is left of the time; it passes on its stdout and exit code 0. Identical programs in one
    `run` call are run once.

    What it is not: proof against a program that means to cheat. Assert tests share a process with the program, which
    could search the interpreter's memory for the expected values, or for the result pipe, and forge a pass; it can read
    what its user may read, use the network, and fill the disk with many files. Leaving early (`sys.exit(0)`,
    `os._exit(0)`), rebinding builtins and printing never pass a test.
    """

    name = "process"

    def __init__(self, slots: int | None = None, python: str = sys.executable) -> None:
        """slots: programs at a time, default one per usable core. python: the interpreter to run them with.

        Raises SandboxError on a system without POSIX processes.
        """
        if os.name != "posix":
            raise SandboxError(
                "sandbox: 'process' needs Linux or macOS (process groups and rlimits); on Windows run mrl inside WSL"
            )
        if slots is not None and slots < 1:
            raise SandboxError(f"sandbox: slots must be at least 1, not {slots}")
        self.slots = slots or _usable_cores()
        self.python = python
        self._threads = ThreadPoolExecutor(self.slots, thread_name_prefix="mrl-sandbox")
        self._lock = threading.Lock()
        self._idle: list[_Supervisor] = []
        self._batches: set[_Batch] = set()
        self._closed = False

    async def run(self, programs: list[Program]) -> list[Verdict]:
        """Judge every program, in the order given; identical ones once. Cancelling it kills what it started.

        Raises SandboxError only when the sandbox was closed.
        """
        batch = _Batch()
        with self._lock:
            if self._closed:
                raise SandboxError("this sandbox was closed")
            self._batches.add(batch)
            jobs = {program: self._threads.submit(self._judge, program, batch) for program in dict.fromkeys(programs)}
        try:
            verdicts = dict(zip(jobs, await asyncio.gather(*map(asyncio.wrap_future, jobs.values())), strict=True))
        finally:
            batch.cancel(jobs.values())
            with self._lock:
                self._batches.discard(batch)
        return [replace(verdicts[p], tests=[replace(t) for t in verdicts[p].tests]) for p in programs]

    async def close(self) -> None:
        """Kill whatever runs and leave no process and no file behind. Safe to call twice."""
        await asyncio.to_thread(self.shutdown)

    def shutdown(self) -> None:
        """`close` for code that has no event loop."""
        with self._lock:
            self._closed = True
            batches = list(self._batches)
        for batch in batches:
            batch.cancel(())
        self._threads.shutdown(wait=True)
        while self._idle:
            self._idle.pop().stop()

    def _judge(self, program: Program, batch: _Batch) -> Verdict:
        """In a thread of the pool. A failure of the sandbox is tried once more, in a new supervisor."""
        verdict = not_judged("never ran")
        for _ in range(2):
            if batch.cancelled:
                return not_judged("cancelled")
            try:
                verdict = self._judge_once(program, batch)
            except Exception as error:  # ours, whatever it is: the program was not judged
                verdict = not_judged(f"{type(error).__name__}: {error}")
            if verdict.judged:
                break
        return verdict

    def _judge_once(self, program: Program, batch: _Batch) -> Verdict:
        supervisor = self._take()
        good = False
        try:
            batch.enter(supervisor)
            runs: list[Run] = []
            for run in _plan(program):
                left = _left(program.limits, runs)
                if left.wall_seconds <= 0 or left.cpu_seconds <= 0:
                    run.status, run.detail = "timeout", "not run: the program's time was used up"
                else:
                    report = supervisor.run(_job(program, run, left), left.wall_seconds + GRACE_SECONDS)
                    run_from_report(run, report, left)
                runs.append(run)
                if run.status == "sandbox_error":
                    return not_judged(run.detail)
            good = True
            return merge_runs(runs, len(program.tests))
        finally:
            batch.leave(supervisor)
            if good and not batch.cancelled and not self._closed:
                self._idle.append(supervisor)
            else:
                supervisor.stop()

    def _take(self) -> _Supervisor:
        try:
            return self._idle.pop()
        except IndexError:
            return _Supervisor(self.python)


class _Batch:
    """The supervisors one `run` call has working for it, so that they can be stopped."""

    def __init__(self) -> None:
        self.cancelled = False
        self._lock = threading.Lock()
        self._active: set[_Supervisor] = set()

    def enter(self, supervisor: _Supervisor) -> None:
        with self._lock:
            self._active.add(supervisor)
            if self.cancelled:
                supervisor.interrupt()

    def leave(self, supervisor: _Supervisor) -> None:
        with self._lock:
            self._active.discard(supervisor)

    def cancel(self, jobs: Any) -> None:
        with self._lock:
            self.cancelled = True
            for supervisor in self._active:
                supervisor.interrupt()
        for job in jobs:
            assert isinstance(job, Future)
            job.cancel()


class _Supervisor:
    """This side of a `_supervisor.py` process. Used by one thread at a time; `interrupt` from any."""

    def __init__(self, python: str) -> None:
        """Raises OSError when `python` cannot be started."""
        self.scratch = tempfile.mkdtemp(prefix="mrl-sandbox-")
        self.socket, theirs = socket.socketpair()
        sources = [str(Path(__file__).parent / name) for name in ("_child.py", "_supervisor.py")]
        try:
            self.process = subprocess.Popen(
                [python, "-s", "-S", "-X", "utf8", "-c", _LOADER, *sources, self.scratch],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env={"PYTHONHASHSEED": "0", "MALLOC_ARENA_MAX": "2"},
                cwd=self.scratch,
                start_new_session=True,
            )
        except BaseException:
            self.socket.close()
            shutil.rmtree(self.scratch, ignore_errors=True)
            raise
        finally:
            theirs.close()

    def run(self, job: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Send a job, wait for its report. Raises SandboxError when the supervisor is gone or does not answer."""
        data = json.dumps(job).encode("ascii")
        try:
            self.socket.settimeout(timeout)
            self.socket.sendall(struct.pack(">I", len(data)) + data)
            (size,) = struct.unpack(">I", self._receive(4))
            return json.loads(self._receive(size))
        except TimeoutError:
            raise SandboxError(f"the sandbox's supervisor did not answer within {timeout:.0f} s") from None
        except (OSError, ValueError) as error:
            raise SandboxError(f"the sandbox's supervisor broke off: {self._last_words() or error}") from None

    def interrupt(self) -> None:
        """Make it kill what it runs and end. The thread that waits for its report gets an error."""
        with contextlib.suppress(OSError):  # it is gone already
            self.socket.shutdown(socket.SHUT_RDWR)

    def stop(self) -> None:
        self.interrupt()
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.socket.close()
        assert self.process.stderr is not None
        self.process.stderr.close()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def _receive(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = self.socket.recv(min(size - len(data), 1 << 20))
            if not part:
                raise ConnectionResetError("connection closed")
            data += part
        return bytes(data)

    def _last_words(self) -> str:
        assert self.process.stderr is not None
        try:
            code = self.process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            return ""
        os.set_blocking(self.process.stderr.fileno(), False)
        words = (self.process.stderr.read() or b"").decode("utf-8", "replace").strip()
        return f"exit code {code}: {words[-500:]}" if words else f"exit code {code}"


_LOADER = """
import sys
def load(path):
    names = {"__name__": "mrl_sandbox"}
    with open(path, encoding="utf-8") as file:
        exec(compile(file.read(), path, "exec"), names)
    return names
sys.path[:] = [p for p in sys.path if p]
load(sys.argv[2])["main"](load(sys.argv[1]), sys.argv[3])
"""


def _plan(program: Program) -> list[Run]:
    """The runs a program needs: one for all its assert tests together, one for each `IOTest`."""
    asserts = [i for i, test in enumerate(program.tests) if isinstance(test, str)]
    runs = [Run(indices=asserts)] if asserts or not program.tests else []
    runs += [Run(indices=[i], io=test) for i, test in enumerate(program.tests) if isinstance(test, IOTest)]
    for run in runs:
        run.nonce = secrets.token_hex(8)
        run.script = run.io is not None or not program.tests
    return runs


def _left(limits: Limits, runs: list[Run]) -> Limits:
    return replace(
        limits,
        wall_seconds=limits.wall_seconds - sum(run.wall_seconds for run in runs),
        cpu_seconds=limits.cpu_seconds - sum(run.cpu_seconds for run in runs),
    )


def _job(program: Program, run: Run, left: Limits) -> dict[str, Any]:
    return {
        "code": program.code,
        "tests": None if run.script else [program.tests[i] for i in run.indices],
        "stdin": run.io.input if run.io else None,
        "nonce": run.nonce,
        "limits": {
            "wall_seconds": left.wall_seconds,
            "cpu_seconds": math.ceil(left.cpu_seconds),
            "memory_bytes": left.memory_mb << 20,
            "file_bytes": left.file_mb << 20,
            "output_bytes": left.output_bytes,
            "open_files": left.open_files,
            "processes": left.processes,
        },
    }


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
