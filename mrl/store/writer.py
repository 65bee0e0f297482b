"""The thread that writes: the loop hands over and goes on.

Each job is one transaction, so readers, and whoever opens the store after a crash, see all of it or nothing. Between
jobs the thread writes a heartbeat: a job of its own, of which only the newest state counts, so that it never waits in
the queue and nobody waits for it.
"""

from __future__ import annotations

import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from mrl.errors import StoreError
from mrl.store.schema import DATABASE, open_writer

Job = Callable[[sqlite3.Connection], None]

QUEUE_LENGTH = 16
"""Jobs (steps, events) that may wait. Then handing over waits, instead of memory filling with rollouts."""

HEARTBEAT_SECONDS = 2.0
"""Between two heartbeats while nothing changes."""
NEWS_SECONDS = 0.25
"""At least so long between two heartbeats, whatever changes."""


class Writer:
    """Owns the run's writing connection. heartbeat: written every two seconds, and soon after `beat_soon`."""

    def __init__(self, folder: Path, heartbeat: Job) -> None:
        """Raises StoreError when the database cannot be opened."""
        self.path = folder / DATABASE
        self.error: StoreError | None = None
        self._heartbeat = heartbeat
        self._news = True
        self._last_beat = float("-inf")
        self._raised = False
        self._connection = open_writer(folder)
        self._queue: queue.Queue[Job | threading.Event | None] = queue.Queue(QUEUE_LENGTH)
        self._thread = threading.Thread(target=self._work, name="mrl-store", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Hand over a transaction. Raises StoreError when an earlier one failed: nothing is written after a failure."""
        self._check()
        self._put(job)

    def beat_soon(self) -> None:
        """What the heartbeat writes has changed. Never waits, never raises."""
        self._news = True

    def flush(self) -> None:
        """Return when all that was handed over is on the disk. Raises StoreError."""
        done = threading.Event()
        self._put(done)
        done.wait()
        self._check()
        try:
            _sync(self.path.with_name(self.path.name + "-wal"))
        except OSError as error:
            self.error = _explain(self.path, error)
            self._check()

    def close(self) -> None:
        """Write what is waiting and close. Raises StoreError unless it has been raised before."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
        if not self._raised:
            self._check()

    def _put(self, item: Job | threading.Event) -> None:
        if not self._thread.is_alive():
            raise StoreError(f"run store {self.path} is closed")
        self._queue.put(item)

    def _check(self) -> None:
        if self.error is not None:
            self._raised = True
            raise self.error

    def _work(self) -> None:
        while (job := self._next_job()) is not None:
            if isinstance(job, threading.Event):
                job.set()
            elif self.error is None:
                try:
                    self._transact(job)
                except Exception as error:
                    self.error = _explain(self.path, error)
            del job  # or the step's rollouts stay in memory until the next one
        try:
            self._connection.close()
        except sqlite3.Error as error:
            self.error = self.error or _explain(self.path, error)

    def _next_job(self) -> Job | threading.Event | None:
        while True:
            self._beat_if_due()
            try:
                return self._queue.get(timeout=NEWS_SECONDS)
            except queue.Empty:
                continue

    def _beat_if_due(self) -> None:
        now = time.monotonic()
        if self.error is not None or now - self._last_beat < (NEWS_SECONDS if self._news else HEARTBEAT_SECONDS):
            return
        self._last_beat, self._news = now, False
        # If it cannot be written, the next one may be; a disk that is full is raised by what must not get lost.
        with suppress(sqlite3.Error, OSError):
            self._transact(self._heartbeat)

    def _transact(self, job: Job) -> None:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            job(self._connection)
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise


def _sync(path: Path) -> None:
    """To the disk, so that it outlives a power failure. Without effect where there is no such file."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _explain(path: Path, error: Exception) -> StoreError:
    name = getattr(error, "sqlite_errorname", "") or ""
    if name.startswith(("SQLITE_FULL", "SQLITE_IOERR")) or isinstance(error, OSError):
        advice = "free space on that disk, then resume the run from its last checkpoint"
    elif name.startswith("SQLITE_BUSY"):
        advice = "another program holds the file; end it, then resume the run from its last checkpoint"
    else:
        advice = "what was written before it is whole"
    explained = StoreError(f"run store {path} could not be written ({error}); {advice}")
    explained.__cause__ = error
    return explained
