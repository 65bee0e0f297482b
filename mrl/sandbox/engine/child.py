"""Inside the confined process: run the program, or the tests that judge it.

All of it is in the program's hands where the program runs. What it says of itself there (that it raised, left, ran out
of memory) is its own word, and earns nothing.
"""

from __future__ import annotations

import atexit
import builtins
import gc
import json
import os
import socket
import sys
import types
from typing import Any

from .. import protocol
from ..judge.asked import Asked
from ..judge.runner import run_judge
from ..protocol import Kind

CONTROL, LINK = 3, 4
"""Descriptors: to the supervisor, and between a program and its judge."""
MAX_DETAIL = 1500
REHEARSALS = 20
MAX_STACK = 64 << 20
"""Of a script's thread: its address space counts as memory."""


def run() -> None:
    """What the supervisor says first. Never returns."""
    leave = os._exit
    try:
        kind, body = protocol.receive(CONTROL)
        if kind is Kind.SCRIPT:
            os.closerange(LINK, LINK + 1)
            run_script(body.decode("utf-8", "surrogatepass"))
        elif kind is Kind.PROGRAM:
            run_program(body.decode("utf-8", "surrogatepass"))
        elif kind is Kind.PLAN:
            run_judge(json.loads(body), CONTROL, LINK)
    finally:  # whatever the program broke: nothing of it goes further
        leave(1)


def rehearse() -> None:
    """In the fork-server, before the first fork: what every child does is done some times, so that the interpreter has
    made of it what it makes of code that runs often. A child would write that into pages that it copies for it."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for _ in range(REHEARSALS):
            names = {"__builtins__": builtins}
            exec(compile("def f(x):\n    return [x]\n", "<program>", "exec", 0, True), names)
            asked = Asked(names, theirs.fileno(), str)
            protocol.send(ours.fileno(), Kind.WANT, json.dumps([["f"], []]).encode())
            asked.open()
            protocol.receive(ours.fileno())
            question = json.dumps(["0" * 16, "call", [], [["O", 0], ["t", [1]], ["t", []]], [], {}]).encode()
            protocol.send(ours.fileno(), Kind.ASK, question)
            asked.answer(json.loads(protocol.receive(theirs.fileno())[1]))
            protocol.receive(ours.fileno())
            flush()


def run_script(code: str) -> None:
    """As `python program.py` would: threads are waited for, exit functions run, objects are given up."""
    names = new_main()
    meet_scripts(code)
    status = load(code, names)
    try:
        threading = sys.modules.get("threading")
        if threading is not None:
            threading._shutdown()
        atexit._run_exitfuncs()
        status = status if flush() else status or 120
        give_up(names)
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


def run_program(code: str) -> None:
    """It is loaded, and then asked."""
    names = new_main()
    leave, send, left, finish = os._exit, protocol.send, Kind.LEFT, flush
    asked = Asked(names, LINK, lambda error: describe_error(error, code))
    status = load(code, names)
    finish()
    if status is not None:
        send(CONTROL, left, str(status).encode())
        leave(status)
    asked.open()
    asked.serve(finish)


def new_main() -> dict[str, Any]:
    main = types.ModuleType("__main__")
    names = main.__dict__
    names["__builtins__"], names["__file__"] = builtins, "program.py"
    sys.modules["__main__"] = main
    sys.argv = ["program.py"]
    return names


def load(code: str, names: dict[str, Any]) -> int | None:
    """Run it. None when it came to its end, else the exit status; the reason is reported."""
    send, base_exception, describe = protocol.send, BaseException, describe_error
    system_exit, memory_error, raised, memory = SystemExit, MemoryError, Kind.ERROR, Kind.MEMORY
    try:
        exec(compile(code, "<program>", "exec", 0, True), names)
    except system_exit as error:
        return exit_code(error)
    except memory_error:
        send(CONTROL, memory)
        return 1
    except base_exception as error:
        send(CONTROL, raised, describe(error, code).encode("ascii", "backslashreplace"))
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
