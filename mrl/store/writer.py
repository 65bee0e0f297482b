"""The thread that writes: the loop hands over and goes on.

Each job is one transaction, so readers, and whoever opens the store after a crash, see all of it or nothing.
"""

from __future__ import annotations

import os
import queue
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

from mrl.errors import StoreError
from mrl.store.schema import DATABASE, open_writer

Job = Callable[[sqlite3.Connection], None]

QUEUE_LENGTH = 16
"""Jobs (steps, events) that may wait. Then handing over waits, instead of memory filling with rollouts."""


class Writer:
    """Owns the run's writing connection."""

    def __init__(self, folder: Path) -> None:
        """Raises StoreError when the database cannot be opened."""
        self.path = folder / DATABASE
        self.error: StoreError | None = None
        self._raised = False
        self._connection = open_writer(folder)
        self._queue: queue.Queue[Job | threading.Event | None] = queue.Queue(QUEUE_LENGTH)
        self._thread = threading.Thread(target=self._work, name="mrl-store", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Hand over a transaction. Raises StoreError when an earlier one failed: nothing is written after a failure."""
        self._check()
        self._put(job)

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
        while (job := self._queue.get()) is not None:
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
