"""One trusted process per slot: forks a program, watches it, and leaves nothing of it behind.

Read as text by `mrl.sandbox.process` and loaded, with `_child`, into a bare interpreter (`python -s -S`), so it imports
nothing but the standard library and does not know `mrl`. A fork of that clean, single-threaded interpreter is as good
as a fresh one and several times cheaper. It never runs a line of the program itself.

Its control socket carries frames (4 bytes of length, then JSON): a job in, a report out. When the socket closes,
whatever runs is killed and the process ends: so it also ends when its parent is killed.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import struct
import sys
import time

if False:  # for type checkers: the import would cost every start
    from collections.abc import Callable

PR_SET_CHILD_SUBREAPER = 36
MAX_RECORDS = 4_000_000  # bytes of records a program may send
REAP_SECONDS = 5.0
PRELOAD = ("collections", "functools", "heapq", "itertools", "math", "random", "re", "string", "typing")


class Cancelled(Exception):
    """The control socket closed."""


def main(child: dict, scratch_root: str) -> None:
    """Serve jobs until the control socket (fd 0) closes. `child`: the globals of `_child`."""
    control, parent = os.dup(0), os.getppid()
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.environ.clear()
    if child["LIBC"] is not None:
        child["LIBC"].prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what leaves its process group still comes back to us
    wake, wake_write = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    for name in PRELOAD:
        __import__(name)
    user = choose_user(child, scratch_root) | {"parent": os.getpid(), "baseline": address_space()}
    gc.collect()
    gc.freeze()  # collections in the children do not touch, and so do not copy, our pages
    count = 0
    try:
        while True:
            job = receive(control, parent)
            count += 1
            scratch = os.path.join(scratch_root, str(count))
            report = run_program(job, child["become_program"], user, control, wake, scratch)
            send(control, report)
    except Cancelled:
        pass
    finally:
        remove_tree(scratch_root)


def receive(control: int, parent: int) -> dict:
    poller = select.poll()
    poller.register(control, select.POLLIN)
    while not poller.poll(2000):
        if os.getppid() != parent:  # the parent is gone, though somebody still holds its end of the socket
            raise Cancelled
    (size,) = struct.unpack(">I", read_exactly(control, 4))
    return json.loads(read_exactly(control, size))


def read_exactly(fd: int, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        try:
            part = os.read(fd, min(size - len(data), 1 << 20))
        except ConnectionError:
            part = b""
        if not part:
            raise Cancelled
        data += part
    return bytes(data)


def send(control: int, report: dict) -> None:
    data = json.dumps(report).encode("ascii")
    view = memoryview(struct.pack(">I", len(data)) + data)
    try:
        while view:
            view = view[os.write(control, view) :]
    except ConnectionError:
        raise Cancelled from None


def run_program(job: dict, become_program: Callable, user: dict, control: int, wake: int, scratch: str) -> dict:
    """One program from fork to clean scratch directory. Returns its report; raises Cancelled."""
    os.mkdir(scratch, 0o700)
    if user["uid"] is not None:
        os.chown(scratch, user["uid"], user["uid"])
    limits = dict(job["limits"], processes=process_limit(job["limits"]["processes"], user))
    limits["memory_bytes"] += user["baseline"]
    started = time.monotonic()
    stdin = open_stdin(job["stdin"], scratch)
    ends = {name: os.pipe() for name in ("stdout", "stderr", "result")}
    pid = os.fork()
    if pid == 0:
        fds = {"stdin": stdin, **{name: pair[1] for name, pair in ends.items()}}
        become_program(dict(job, limits=limits), fds, scratch, user)
        os._exit(1)
    os.close(stdin)
    for _, write_end in ends.values():
        os.close(write_end)
    pipes = {pair[0]: name for name, pair in ends.items()}
    received = {name: bytearray() for name in ends}
    for fd in pipes:
        os.set_blocking(fd, False)
    try:
        stopped = watch(pid, pipes, received, started + limits["wall_seconds"], limits["output_bytes"], control, wake)
        wall = time.monotonic() - started
    finally:
        status, usage, clean = reap(pid, wake)
        for fd, name in pipes.items():
            drain(fd, received[name], limits["output_bytes"] if name != "result" else MAX_RECORDS)
            os.close(fd)
        remove_tree(scratch)
    return {
        "stopped": stopped,
        "status": status,
        "clean": clean,
        "wall_seconds": wall,
        "cpu_seconds": usage.ru_utime + usage.ru_stime if usage else 0.0,
        "peak_memory_mb": usage.ru_maxrss / (1024 if sys.platform == "linux" else 1024 * 1024) if usage else 0.0,
        "records": received["result"].decode("ascii", "replace"),
        "stdout": received["stdout"].decode("utf-8", "replace"),
        "stderr": received["stderr"].decode("utf-8", "replace"),
    }


def watch(
    pid: int, pipes: dict, received: dict, deadline: float, output_bytes: int, control: int, wake: int
) -> str | None:
    """Collect output until the program ends. Returns why it has to be stopped (`timeout` …), or None when it ended."""
    poller = select.poll()
    for fd in (*pipes, control, wake):
        poller.register(fd, select.POLLIN)
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            return "timeout"
        ended = False
        for fd, _ in poller.poll(int(left * 1000) + 1):
            if fd == control:
                raise Cancelled
            if fd == wake:
                empty(wake)
                ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
            elif not pump(fd, received[pipes[fd]]):
                poller.unregister(fd)
        if len(received["stdout"]) + len(received["stderr"]) > output_bytes:
            return "output_limit"
        if len(received["result"]) > MAX_RECORDS:
            return "protocol"
        if ended:
            return None


def pump(fd: int, into: bytearray) -> bool:
    """Read what is there, at most 64 KiB. False at the end of the pipe."""
    try:
        data = os.read(fd, 65536)
    except BlockingIOError:
        return True
    into += data
    return bool(data)


def drain(fd: int, into: bytearray, limit: int) -> None:
    before = -1
    while before < len(into) <= limit:
        before = len(into)
        pump(fd, into)
    del into[limit + 1 :]


def empty(wake: int) -> None:
    try:
        while os.read(wake, 512):
            pass
    except BlockingIOError:
        pass


def reap(pid: int, wake: int) -> tuple:
    """Kill the program's group and everything that descended from it. Returns (wait status, rusage, nothing is left).

    The group is killed while its leader is still unreaped, so its number cannot have been given to somebody else.
    """
    for kill in (os.kill, os.killpg):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
    status, usage = 0, None
    give_up = time.monotonic() + REAP_SECONDS
    poller = select.poll()
    poller.register(wake, select.POLLIN)
    while True:
        empty(wake)
        try:
            found, its_status, its_usage = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return status, usage, True
        if found == pid:
            status, usage = its_status, its_usage
        if found:
            continue
        if time.monotonic() > give_up:
            return status, usage, False
        for orphan in children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(orphan, signal.SIGKILL)
        poller.poll(20)


def children() -> list[int]:
    me, found = str(os.getpid()), []
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    if file.read().rpartition(b")")[2].split()[1].decode() == me:
                        found.append(int(name))
            except OSError:  # it ended while we looked
                pass
    return found


def open_stdin(text: str | None, scratch: str) -> int:
    if text is None:
        return os.open(os.devnull, os.O_RDONLY)
    path = scratch + ".in"
    with open(path, "wb") as file:
        file.write(text.encode("utf-8", "surrogatepass"))
    fd = os.open(path, os.O_RDONLY)
    os.unlink(path)
    return fd


def remove_tree(path: str) -> None:
    try:
        os.rmdir(path)  # most programs write no file
    except OSError:
        import shutil

        def unlock(function: Callable, name: str, _: object) -> None:
            try:
                os.chmod(os.path.dirname(name), 0o700)
                os.chmod(name, 0o700)
                function(name)
            except OSError:
                pass

        shutil.rmtree(path, onerror=unlock)


def choose_user(child: dict, scratch_root: str) -> dict:
    """As root, an unused user id for the programs of this slot: they can then signal only each other, write only their
    scratch directory, and the kernel counts their processes. Nothing changes when we are not root or may not switch."""
    user = {"uid": None, "keep_read": False}
    if os.geteuid() != 0 or child["LIBC"] is None:
        return user
    uid = 61184 + os.getpid() % 4336  # systemd's range for users made up on the spot
    os.chmod(scratch_root, 0o711)
    for keep_read in (False, True):
        pid = os.fork()
        if pid == 0:
            try:
                child["drop_privileges"](uid, keep_read)
                os.chdir(scratch_root)
                os.listdir(os.path.dirname(os.__file__))
                os._exit(0)
            except BaseException:
                os._exit(1)
        if os.waitpid(pid, 0)[1] == 0:
            return {"uid": uid, "keep_read": keep_read}
    return user


def address_space() -> int:
    """Bytes of it this process has, which its forks start with."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def process_limit(wanted: int, user: dict) -> int | None:
    """RLIMIT_NPROC counts all processes and threads of a user: exact when the program has a user of its own; else
    what the whole machine runs now is added, which stops a fork bomb but is no exact bound; None for root."""
    if user["uid"] is not None:
        return wanted
    if os.geteuid() == 0:
        return None
    try:
        with open("/proc/loadavg") as file:
            return wanted + 64 + int(file.read().split()[3].partition("/")[2])
    except OSError:
        return None
