"""Runs inside the process that becomes the untrusted program: confine it, run it, report each test as it ends.

Read as text by `mrl.sandbox.process` and loaded into a bare interpreter, so it imports nothing but the standard
library and does not know `mrl`. Everything it needs after the program has started is captured in local variables
first: a program that rebinds `os.write` or `builtins.exec` changes nothing here. (It shares a process with this code
all the same; see `ProcessSandbox` for what that means.)

Each record on the result pipe is one line of ASCII: `<nonce> <kind> <index> <escaped detail>`. Kinds: `S` could not be
confined, `E` the program raised, `M` it ran out of memory, `X` it called `sys.exit` (index = code), `P`/`F`/`G` a test
passed / failed / failed for want of memory, `D` done (index = exit code).
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import os
import resource
import signal
import sys
import types

MAX_DETAIL = 1500
RESULT_FD = 180  # somewhere in RESULT_FD .. RESULT_FD + 63: above what `open_files` hands out, below any soft limit
KEEP_READ = 1 << 2  # CAP_DAC_READ_SEARCH
PR_SET_PDEATHSIG, PR_SET_KEEPCAPS, PR_SET_NO_NEW_PRIVS = 1, 8, 38
LINUX = sys.platform == "linux"
LIBC = ctypes.CDLL(None, use_errno=True) if LINUX else None
"".encode("unicode_escape")  # loads the codec now, not from an import system that a program may have changed


def become_program(job: dict, fds: dict[str, int], scratch: str, user: dict) -> None:
    """Never returns. `fds`: stdin, stdout, stderr, result. `user`: uid (None = stay who we are), keep_read, parent."""
    result, leave = fds["result"], os._exit
    try:
        result = take_fds(fds, int(job["nonce"][:8], 16) % 64)
        confine(job["limits"], scratch, user)
        sys.argv = ["program.py"]
        sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
        sys.__stdin__ = sys.stdin  # type: ignore[misc]
    except BaseException as error:  # whatever it is, the program was not judged
        os.write(result, f"{job['nonce']} S 0 {type(error).__name__}: {error}\n".encode("ascii", "backslashreplace"))
        leave(0)
    try:
        execute(job["code"], job["tests"], job["nonce"], result)
    finally:  # also when the program broke our means of reporting: nothing of it may reach the supervisor's code
        leave(1)


def take_fds(fds: dict[str, int], offset: int) -> int:
    os.dup2(fds["result"], RESULT_FD + offset, inheritable=False)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.dup2(fds[name], number)
    os.closerange(3, RESULT_FD + offset)
    os.closerange(RESULT_FD + offset + 1, RESULT_FD + 256)
    return RESULT_FD + offset


def confine(limits: dict, scratch: str, user: dict) -> None:
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.chdir(scratch)
    os.umask(0o077)
    if LINUX:
        with open("/proc/self/oom_score_adj", "w") as file:  # the kernel takes the program before the trainer
            file.write("1000")
    set_limits(limits)
    if user["uid"] is not None:
        drop_privileges(user["uid"], user["keep_read"])
    if LIBC is not None:
        LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        LIBC.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)  # after setuid, which clears it
    if os.getppid() != user["parent"]:
        os._exit(1)


def set_limits(limits: dict) -> None:
    wanted = [
        ("RLIMIT_CORE", 0, 0),
        ("RLIMIT_CPU", limits["cpu_seconds"], limits["cpu_seconds"] + 1),  # SIGXCPU first, then SIGKILL
        ("RLIMIT_FSIZE", limits["file_bytes"], limits["file_bytes"]),
        ("RLIMIT_NOFILE", limits["open_files"], limits["open_files"]),
        ("RLIMIT_NPROC", limits["processes"], limits["processes"]),
        ("RLIMIT_AS", limits["memory_bytes"], limits["memory_bytes"]),
    ]
    for name, soft, hard in wanted:
        kind = getattr(resource, name, None)
        if kind is None or soft is None:
            continue
        ceiling = resource.getrlimit(kind)[1]
        if ceiling != resource.RLIM_INFINITY:
            soft, hard = min(soft, ceiling), min(hard, ceiling)
        try:
            resource.setrlimit(kind, (soft, hard))
        except (ValueError, OSError):
            if LINUX:  # other systems lack some (macOS has no RLIMIT_AS to speak of)
                raise


def drop_privileges(uid: int, keep_read: bool) -> None:
    """Become `uid`. keep_read: go on reading files anywhere, because the interpreter's own are not public."""
    if keep_read and LIBC is not None:
        LIBC.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    if keep_read and LIBC is not None:
        header = (ctypes.c_uint32 * 2)(0x20080522, 0)
        data = (ctypes.c_uint32 * 6)(KEEP_READ, KEEP_READ, 0, 0, 0, 0)
        if LIBC.capset(header, data) != 0:
            raise OSError(ctypes.get_errno(), "capset")


def execute(code: str, tests: list[str] | None, nonce: str, result: int) -> None:
    """Run the program, then its assert tests; with `tests` None it is a script and ends as one. Never returns."""
    run, compile_, write, leave, pid, getpid = exec, compile, os.write, os._exit, os.getpid(), os.getpid
    base_exception, system_exit, memory_error = BaseException, SystemExit, MemoryError
    describe, finish, flush, script = describe_error, end_script, flush_output, tests is None
    out_of_memory = {kind: f"{nonce} {kind} %d MemoryError\n".encode("ascii") for kind in "MG"}

    def emit(kind: str, index: int, detail: str = "") -> None:
        if getpid() != pid:  # a copy the program forked: only the original reports
            leave(0)
        line = f"{nonce} {kind} {index} {detail[:MAX_DETAIL]}".encode("unicode_escape")
        write(result, line[: 2 * MAX_DETAIL] + b"\n")

    main = types.ModuleType("__main__")
    names = main.__dict__
    names["__builtins__"], names["__file__"] = builtins, "program.py"
    sys.modules["__main__"] = main
    status = 0
    try:
        run(compile_(code, "<program>", "exec", 0, True), names)
    except system_exit as error:
        status = exit_code(error)
        if not script:
            emit("X", status)
            leave(0)
    except memory_error:
        write(result, out_of_memory["M"] % 0)
        leave(0)
    except base_exception as error:
        emit("E", 0, describe(error, {"<program>": code}))
        finish(1) if script else leave(0)
    if script:
        emit("D", finish(status))
        leave(status)
    for index, test in enumerate(tests or ()):
        try:
            run(compile_(test, "<test>", "exec", 0, True), names)
        except memory_error:
            write(result, out_of_memory["G"] % index)
        except base_exception as error:
            emit("F", index, describe(error, {"<program>": code, "<test>": test}))
        else:
            emit("P", index)
    flush()  # no more: a thread or exit handler of the program cannot change what was found
    emit("D", 0)
    leave(0)


def end_script(status: int) -> int:
    """What the interpreter does at the end of a script: wait for threads, run exit handlers, flush. The exit code."""
    try:
        threading = sys.modules.get("threading")
        if threading is not None:
            threading._shutdown()
        atexit._run_exitfuncs()
    except BaseException:
        status = status or 120
    return status if flush_output() else status or 120


def flush_output() -> bool:
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # closed, replaced or full: what was written is what counts
        return False
    return True


def exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1


def describe_error(error: BaseException, sources: dict[str, str]) -> str:
    """Type, message, and the last line of the program and of the test that it passed through."""
    try:
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    except BaseException:  # a hostile __str__
        text = "an exception that cannot be shown"
    where: dict[str, int] = {}
    if isinstance(error, SyntaxError) and error.filename in sources and error.lineno:
        where[error.filename] = error.lineno
    trace = error.__traceback__
    while trace is not None:
        where[trace.tb_frame.f_code.co_filename] = trace.tb_lineno
        trace = trace.tb_next
    for name, number in where.items():
        if name in sources:
            lines = sources[name].splitlines()
            line = lines[number - 1].strip() if 0 < number <= len(lines) else ""
            text += f"\n{name[1:-1]} line {number}: {line[:300]}"
    return text
