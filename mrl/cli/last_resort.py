"""What runs every command: each failure is one message and an exit code, never a traceback."""

from __future__ import annotations

import contextlib
import platform
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

import mrl
from mrl.errors import MRLError
from mrl.system.interrupts import end_process, exit_code, interrupts, leave
from mrl.system.shell import command

USERS_TO_MEND = 2
UNFORESEEN = 1


class _Signalled(KeyboardInterrupt):
    """SIGTERM or SIGHUP, where nothing was listening for it."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def run_command(work: Callable[[], int], arguments: list[str]) -> NoReturn:
    """Run a command and exit: with its code, 2 for what its user can mend, 1 for what nobody foresaw, 128 + the number
    of the signal that ended it. arguments: for the report of what was not foreseen."""
    _accept_every_character()
    try:
        with interrupts(_raise, _end):
            code = work()
    except MRLError as error:
        from mrl.config.dialects import in_flags

        complain(str(error) if error.worded else in_flags(str(error)))
        sys.exit(USERS_TO_MEND)
    except KeyboardInterrupt as error:
        number = getattr(error, "number", signal.SIGINT)
        complain(f"stopped by {signal.Signals(number).name}")
        leave(exit_code(number))
    except BrokenPipeError:  # whoever read has seen enough
        sys.exit(0)
    except Exception as error:
        complain(_unforeseen(error, arguments))
        sys.exit(UNFORESEEN)
    if code > exit_code(0):
        leave(code)
    sys.exit(code)


def complain(message: str) -> None:
    """Say to the user what is wrong."""
    with contextlib.suppress(OSError):  # a closed terminal
        print(f"mrl: error: {message}", file=sys.stderr)


def says_everything() -> bool:
    """Whether stdout's encoding has every character."""
    return (getattr(sys.stdout, "encoding", None) or "utf-8").lower().startswith("utf")


def _raise(number: int) -> None:
    raise _Signalled(number)


def _end(number: int) -> None:
    end_process(number, "stopped at once")


def _accept_every_character() -> None:
    """What an output's encoding lacks becomes a question mark."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)  # others than the interpreter's own may have none
        if reconfigure is not None:
            reconfigure(errors="replace")


def _unforeseen(error: Exception, arguments: list[str]) -> str:
    lines = str(error).strip().splitlines()
    what = f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
    head = f"{command('mrl', *arguments)}\nmrl {mrl.__version__}, Python {platform.python_version()}, "
    text = f"{head}{platform.platform()}\n\n{''.join(traceback.format_exception(error))}"
    try:
        descriptor, path = tempfile.mkstemp(prefix=f"mrl-error-{time.strftime('%Y%m%d-%H%M%S')}-", suffix=".txt")
        with open(descriptor, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
    except OSError:
        return f"nobody foresaw this: {what}; please report it with what follows and the output of `mrl doctor`\n{text}"
    return f"nobody foresaw this: {what}; the traceback is in {path}: please report it with the output of `mrl doctor`"
