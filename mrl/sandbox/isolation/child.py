"""Inside the confined process: run the program, answer what is asked of it. Everything here is in the program's hands.

It reports data and judges nothing; a program that takes this code over can send other data, which is then compared
with expected values it has never seen. Messages to the supervisor: `C` confined or `S` could not be, before the
program is read; `R` loaded, `V` call's value, `X` call raised, `E` the program raised, `M` ran out of memory,
`Q` it asked to exit.
"""

from __future__ import annotations

import atexit
import builtins
import json
import os
import sys
import types
from typing import Any

from .. import plain
from . import frames

MAX_DETAIL = 1500


def new_main() -> dict[str, Any]:
    main = types.ModuleType("__main__")
    names = main.__dict__
    names["__builtins__"], names["__file__"] = builtins, "program.py"
    sys.modules["__main__"] = main
    sys.argv = ["program.py"]
    return names


def load(code: str, names: dict[str, Any], channel: int) -> int | None:
    """Run it. None when it came to its end, else the exit status; the reason is reported."""
    write, pack, base_exception, describe = frames.write, frames.pack, BaseException, describe_error
    system_exit, memory_error = SystemExit, MemoryError
    out_of_memory = pack(b"M")
    try:
        exec(compile(code, "<program>", "exec", 0, True), names)
    except system_exit as error:
        return exit_code(error)
    except memory_error:
        write(channel, out_of_memory)
        return 1
    except base_exception as error:
        write(channel, pack(b"E", describe(error, code)))
        return 1
    return None


def run_script(code: str, channel: int) -> None:
    status = load(code, new_main(), channel)
    try:
        threading = sys.modules.get("threading")
        if threading is not None:
            threading._shutdown()
        atexit._run_exitfuncs()
    except BaseException:
        status = status or 120
    if not flush():
        status = status or 120
    os._exit(status or 0)


def run_calls(code: str, channel: int) -> None:
    names = new_main()
    read, write, finish = frames.read, frames.write, flush
    load_or_leave(code, names, channel)
    while True:
        _, body = read(channel)
        answer = answer_call(json.loads(body), names, code)
        finish()
        write(channel, answer)


def load_or_leave(code: str, names: dict[str, Any], channel: int) -> None:
    """Run the program and say that it is ready, or why not and end."""
    write, pack, finish, leave = frames.write, frames.pack, flush, os._exit
    status = load(code, names, channel)
    finish()
    if status is not None:
        write(channel, pack(b"Q", str(status).encode()))
        leave(status)
    write(channel, pack(b"R"))


def answer_call(call: dict[str, Any], names: dict[str, Any], code: str) -> bytes:
    """The token of the call comes back with its answer: one that was written before it was asked has none."""
    token = call["id"].encode()
    args = [plain.loads(text) for text in call["args"]]
    kwargs = {name: plain.loads(text) for name, text in call["kwargs"]}
    try:
        result = eval(compile(call["function"], "<call>", "eval", 0, True), names)(*args, **kwargs)
    except SystemExit as error:
        return frames.pack(b"Q", token + str(exit_code(error)).encode())
    except BaseException as error:
        names_of_bases = [plain.type_name_of(kind) for kind in type.mro(type(error))][:20]
        body = json.dumps([names_of_bases, describe_error(error, code).decode("ascii")])
        return frames.pack(b"X", token + body.encode())
    return frames.pack(b"V", token + plain.dumps(result).encode())


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


def describe_error(error: BaseException, code: str) -> bytes:
    """ASCII: type, message and the last line of the program it passed through."""
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
    return text[:MAX_DETAIL].encode("ascii", "backslashreplace")
