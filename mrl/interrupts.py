"""Ctrl-C: once to end in good order, twice to end at once."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

INTERRUPTED_TWICE = 130


@contextmanager
def interrupts(stop: Callable[[], None]) -> Iterator[None]:
    """Within it, the first Ctrl-C calls `stop` on the running event loop, and a second one ends the process.

    Without effect off the main thread and where there are no signals.
    """
    loop, interrupted = asyncio.get_running_loop(), False

    def interrupt() -> None:
        nonlocal interrupted
        if interrupted:
            os._exit(INTERRUPTED_TWICE)
        interrupted = True
        stop()

    try:
        loop.add_signal_handler(signal.SIGINT, interrupt)
    except (NotImplementedError, RuntimeError, ValueError):  # not the main thread, or not POSIX
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
