"""Inside the confined process: run the program, or the tests that judge it.

All of it is in the program's hands where the program runs. What it says of itself there (that it raised, left, ran out
of memory) is its own word, and earns nothing.
"""

from __future__ import annotations

import _socket
import atexit
import builtins
import contextlib
import gc
import os
import sys
import types
from typing import Any

from .. import protocol
from ..confine import kernel
from ..confine.layers import perform
from ..judge.asked import Asked
from ..judge.runner import run_judge
from ..protocol import Kind

CONTROL, LINK = 3, 4
"""Descriptors: to the supervisor, and between a program and its judge."""
MAX_DETAIL = 1500
REHEARSALS = 20
CONFINED = protocol.pack(Kind.CONFINED)
MAX_STACK = 64 << 20
"""Of a script's thread: its address space counts as memory."""


MAIN = types.ModuleType("__main__")
MAIN.__dict__.update(__builtins__=builtins, __file__="program.py")
NAMES = MAIN.__dict__
"""A program's, made before it is there."""


def run() -> None:
    """What the supervisor says first. Never returns."""
    leave = os._exit
    gc.enable()
    try:
        os.write(CONTROL, CONFINED)  # from here on a program may speak; what it says of us is not believed
        follow(CONTROL, LINK, ASKED)
    finally:  # whatever the program broke: nothing of it goes further
        leave(1)


def follow(control: int, link: int, asked: Asked) -> None:
    kind, body = protocol.receive(control)
    if kind is Kind.PROGRAM:
        run_program(body.decode("utf-8", "surrogatepass"), control, asked)
    elif kind is Kind.SCRIPT:
        os.closerange(link, link + 1)
        run_script(body.decode("utf-8", "surrogatepass"), control)
    elif kind is Kind.PLAN:
        run_judge(protocol.parse(body), control, link)


def rehearse() -> None:
    """In the fork-server, before the first fork: what every child does is done some times, so that the interpreter has
    made of it what it makes of code that runs often. A child would write that into pages that it copies for it."""
    sys.modules["__main__"], sys.argv = MAIN, ["program.py"]
    for _ in range(REHEARSALS):
        told, control, asking, link = ends = *_socket.socketpair(), *_socket.socketpair()
        try:
            told.send(protocol.pack(Kind.PROGRAM, b"def f(x):\n    return [x]\n"))
            question = ["0" * 16, "call", [], [["O", 0], ["t", [1]], ["t", []]], [], {}]
            for kind, body in ((Kind.WANT, [["f"], []]), (Kind.ASK, question)):
                asking.send(protocol.pack(kind, protocol.dump(body)))
            asking.shutdown(_socket.SHUT_WR)
            with contextlib.suppress(protocol.Closed):
                follow(control.fileno(), link.fileno(), Asked(NAMES, link.fileno(), describe_error))
        finally:
            for end in ends:
                end.close()
        perform((kernel.act("prctl", kernel.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),))
        del NAMES["f"]


def run_script(code: str, control: int) -> None:
    """As `python program.py` would: threads are waited for, exit functions run, objects are given up."""
    meet_scripts(code)
    status = load(code, NAMES, control)
    try:
        threading = sys.modules.get("threading")
        if threading is not None:
            threading._shutdown()
        atexit._run_exitfuncs()
        status = status if flush() else status or 120
        give_up(NAMES)
    except BaseException:
        status = status or 120
    if not flush():
        status = status or 120
    os._exit(status or 0)


def give_up(names: dict[str, Any]) -> None:
    """A module's names in the order in which the interpreter would: files are written, `__del__` may print."""
    for name in sorted(names, key=lambda name: not name.startswith("_")):
        if not name.startswith("__"):
            names[name] = None
    gc.collect()


def meet_scripts(code: str) -> None:
    """What scripts for contests expect: a /dev/stdin, which is not there to open, and half a gigabyte of stack for a
    thread, which has less. (Python's own calls take none.)"""
    if "/dev/std" in code:
        opened, standard = builtins.open, {"/dev/stdin": 0, "/dev/stdout": 1, "/dev/stderr": 2}

        def open_(file: Any, *args: Any, **kwargs: Any) -> Any:
            number = standard.get(file) if isinstance(file, str) else None
            return opened(file if number is None else os.dup(number), *args, **kwargs)

        builtins.open = open_
    if "stack_size" in code:
        import threading

        set_size = threading.stack_size
        threading.stack_size = lambda size=0: set_size(min(size, MAX_STACK))


def run_program(code: str, control: int, asked: Asked) -> None:
    """It is loaded, and then asked."""
    leave, send, left, finish = os._exit, protocol.send, Kind.LEFT, flush
    asked.code = code
    status = load(code, asked.names, control)
    finish()
    if status is not None:
        send(control, left, str(status).encode())
        leave(status)
    asked.open()
    asked.serve(finish)


def load(code: str, names: dict[str, Any], control: int) -> int | None:
    """Run it. None when it came to its end, else the exit status; the reason is reported."""
    send, base_exception, describe = protocol.send, BaseException, describe_error
    system_exit, memory_error, raised, memory = SystemExit, MemoryError, Kind.ERROR, Kind.MEMORY
    try:
        exec(compile(code, "<program>", "exec", 0, True), names)
    except system_exit as error:
        return exit_code(error)
    except memory_error:
        send(control, memory)
        return 1
    except base_exception as error:
        send(control, raised, describe(error, code).encode("ascii", "backslashreplace"))
        return 1
    return None


def flush() -> bool:
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


def describe_error(error: BaseException, code: str) -> str:
    """Type, message and the last line of the program it passed through."""
    try:
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        number = error.lineno if isinstance(error, SyntaxError) and error.filename == "<program>" else None
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == "<program>":
                number = trace.tb_lineno
            trace = trace.tb_next
        if number is not None:
            lines = code.splitlines()
            line = lines[number - 1].strip() if 0 < number <= len(lines) else ""
            text += f"\nprogram line {number}: {line[:300]}"
    except BaseException:  # a hostile __str__
        text = "an exception that cannot be shown"
    return text[:MAX_DETAIL]


ASKED = Asked(NAMES, LINK, describe_error)
"""Made before the fork, as all that a child can do without making."""
