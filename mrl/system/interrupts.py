"""Ctrl-C, SIGTERM and SIGHUP: the first ends a run in good order, the second at once.

Slurm, Docker, Kubernetes and preempted machines send SIGTERM some seconds before they kill; a terminal that
is closed sends SIGHUP.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")
SAME_SECONDS = 1.0
"""Programs that pass a signal on send it twice, once to the process and once to its group: within so long, SIGTERM or
SIGHUP again is the same one. Ctrl-C twice is always two."""


class Stopped(Exception):
    """The run was asked to stop, and what was in flight is given up."""


@contextmanager
def interrupts(stop: Callable[[int], None], end: Callable[[int], None]) -> Iterator[None]:
    """Within it, the first of `SIGNALS` calls `stop` with its number, and every later one `end`.

    Both are called from a signal handler on the main thread: they must not wait for anything. A signal that was
    ignored stays ignored (`nohup` does that with SIGHUP), and the handlers from before are put back. Without effect off
    the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    first: float | None = None

    def handle(number: int, frame: object) -> None:
        nonlocal first
        if first is None:
            first = time.monotonic()
            stop(number)
        elif number == signal.SIGINT or time.monotonic() - first > SAME_SECONDS:
            end(number)

    before = {}
    for number in (getattr(signal, name) for name in SIGNALS if hasattr(signal, name)):
        if signal.getsignal(number) not in (signal.SIG_IGN, None):  # None: not Python's to put back
            before[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def exit_code(number: int) -> int:
    """Exit code of a process ended by a signal, as in shells: 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP."""
    return 128 + number


def end_process(number: int, last_words: str) -> NoReturn:
    """End now, from within a signal handler: nothing is waited for, no `finally` runs."""
    cursor = "\x1b[?25h" if os.isatty(2) else ""  # a live display may have hidden it
    with contextlib.suppress(OSError):  # nobody is left to read it
        os.write(2, f"{cursor}\n{last_words}\n".encode(errors="replace"))
    os._exit(exit_code(number))


def leave(code: int) -> NoReturn:
    """Exit after a run that was stopped, without waiting for threads that still load a model or the like."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a closed terminal
            stream.flush()
    deadline = time.monotonic() + SAME_SECONDS
    others = [t for t in threading.enumerate() if t is not threading.main_thread()]
    others = [t for t in others if not t.daemon or t.name.startswith("mrl-")]  # which may be in the midst of an import
    for thread in others:
        thread.join(max(deadline - time.monotonic(), 0.0))
    if any(thread.is_alive() for thread in others):
        os._exit(code)
    sys.exit(code)
