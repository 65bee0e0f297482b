"""A run is a folder.

runs/NAME/
  config.yaml          every option, resolved
  versions.json        libraries and machine
  run.db               SQLite: steps, metrics, tasks, rollouts, events, progress (tables in mrl/store/schema.py)
  run.lock             held by the process that writes
  media/SHA256         images that rollouts saw
  checkpoints/step-N   a Hugging Face model folder each
"""

from __future__ import annotations

import atexit
import json
import os
import platform
import socket
import sqlite3
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from mrl.config import OrchestratorConfig
from mrl.errors import ConfigError, StoreError
from mrl.store.export import write_rollouts
from mrl.store.find import find_run, runs_root
from mrl.store.lock import RunLock
from mrl.store.media import MediaFolder
from mrl.store.progress import Progress, close_progress, progress_row, write_progress
from mrl.store.read import read_rows
from mrl.store.record import write_record
from mrl.store.rows import number, step_id_of, text, to_json
from mrl.store.schema import DATABASE, check_version, create_database
from mrl.store.writer import Writer
from mrl.system.environment import library_versions
from mrl.types import Group, Outcome

__all__ = ["RunStore", "find_run", "read_rows", "runs_root", "write_rollouts"]

CONFIG = "config.yaml"
VERSIONS = "versions.json"


class RunStore:
    """Writes one run's folder. One writer per run; readers may open it at any time (see `mrl.store.read`).

    What is handed over is written by a thread, each call in one transaction; rollouts must not be changed afterwards.
    A write that fails is raised as StoreError by the next call, `flush` or `close`.
    """

    folder: Path
    _lock: RunLock
    _writer: Writer
    _media: MediaFolder
    _outcome: Outcome = "interrupted"
    _error: str | None = None
    _closed = False
    _pid: int

    def __init__(self, folder: Path, config: OrchestratorConfig) -> None:
        """Create the run. Raises ConfigError when the folder already holds one or cannot be written."""
        self._refuse_existing(folder)
        try:
            (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
            lock = RunLock(folder)
        except OSError as error:
            raise ConfigError(f"run_dir: {folder} cannot be written ({error.strerror}); choose another") from None
        try:
            self._refuse_existing(folder)  # now that nobody else creates one
            self._create(folder, config)
            self._open(folder, lock)
        except (OSError, sqlite3.Error) as error:
            lock.release()
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"run_dir: {folder} cannot be written ({reason}); choose another") from None
        except BaseException:
            lock.release()
            raise

    @classmethod
    def reopen(cls, folder: Path) -> RunStore:
        """Go on writing a run. Raises StoreError when there is none, or another process writes it, or its store is of
        another version."""
        if not (folder / CONFIG).is_file():
            raise StoreError(f"{folder} holds no run (no {CONFIG})")
        check_version(folder)
        store = cls.__new__(cls)
        try:
            lock = RunLock(folder)
        except OSError as error:
            raise StoreError(f"{folder} cannot be written ({error.strerror})") from None
        try:
            store._open(folder, lock, resumed=True)
        except BaseException:
            lock.release()
            raise
        store._note_versions()
        return store

    # --- writing ----------------------------------------------------------------------------------------------------

    def write_step(self, step: int, metrics: dict[str, float], groups: Iterable[Group]) -> None:
        """A step's metrics and every rollout behind them, replacing what the store has for that step."""
        self._write("train", step, metrics, groups)

    def write_eval(self, step: int, metrics: dict[str, float], groups: Iterable[Group]) -> None:
        """The same for the held-out evaluation after `step`."""
        self._write("eval", step, metrics, groups)

    def event(self, kind: str, message: str, **details: Any) -> None:
        """Something a person may want to know later. `step` among the details ties it to a step."""
        now, step = time.time(), details.pop("step", None)
        values = (now, step, text(kind), text(message), text(to_json(details).decode("utf-8", "surrogatepass")))
        self._writer.submit(
            lambda db: _ignore(
                db.execute("INSERT INTO events (time, step, kind, message, details) VALUES (?, ?, ?, ?, ?)", values)
            )
        )

    def report(self, progress: Progress) -> None:
        """What the run is doing now. Never waits, never raises: it is written up to
        four times a second, and with a heartbeat every two seconds where nothing changes."""
        self._progress = progress_row(progress)
        self._writer.beat_soon()

    def rewind(self, step: int) -> None:
        """Forget what came after `step`: steps, evaluations, rollouts and events. Returns when it is on the disk."""

        def job(db: sqlite3.Connection) -> None:
            db.execute("DELETE FROM steps WHERE id > ?", (step_id_of("eval", step),))
            db.execute("DELETE FROM events WHERE step > ?", (step,))

        self._writer.submit(job)
        self._writer.flush()

    def flush(self) -> None:
        """Return when everything is on the disk, safe from a power failure too. Raises StoreError."""
        self._writer.flush()

    def finish(self, outcome: Outcome, error: str | None = None) -> None:
        """How the run ended, written by `close`; without it, the run counts as interrupted. Never raises."""
        self._outcome, self._error = outcome, error

    def checkpoint_path(self, step: int) -> Path:
        """Where the checkpoint of `step` goes."""
        return self.folder / "checkpoints" / f"step-{step}"

    def close(self) -> None:
        """Write what is waiting and the outcome, then let others write. Raises StoreError if nothing has yet."""
        if self._closed or os.getpid() != self._pid:  # a forked child has no part in it
            return
        self._closed = True
        atexit.unregister(self.close)
        values = (self._outcome, None if self._error is None else text(self._error), time.time())

        def job(db: sqlite3.Connection) -> None:
            db.execute("UPDATE run SET status = ?, error = ?, ended = ?", values)
            close_progress(db, self._outcome)

        try:
            if self._writer.error is None:
                self._writer.submit(job)
            self._writer.close()
        finally:
            self._lock.release()

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _refuse_existing(self, folder: Path) -> None:
        if _holds_a_run(folder):
            raise ConfigError(f"run_dir: {folder} already holds a run; choose another name or delete it")

    def _create(self, folder: Path, config: OrchestratorConfig) -> None:
        create_database(folder)
        (folder / VERSIONS).write_text(json.dumps(_versions(), indent=2))
        partial = folder / f"{CONFIG}.partial"
        partial.write_text(yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True))
        os.replace(partial, folder / CONFIG)  # last: a folder with a configuration is a run

    def _open(self, folder: Path, lock: RunLock, resumed: bool = False) -> None:
        self.folder = folder
        self._lock = lock
        self._pid = os.getpid()
        self._progress = progress_row(Progress())  # nothing of what a process before this one was doing
        self._writer = Writer(folder, self._beat)
        self._media = MediaFolder(folder, lambda message: self.event("media", message))
        now = time.time()
        self._writer.submit(
            lambda db: _ignore(
                db.execute(
                    "INSERT INTO run (id, status, pid, host, created, started) VALUES (1, 'running', ?, ?, ?, ?) "
                    "ON CONFLICT DO UPDATE SET status = 'running', error = NULL, pid = excluded.pid, "
                    "host = excluded.host, started = excluded.started, ended = NULL, resumes = resumes + ?",
                    (os.getpid(), socket.gethostname(), now, now, int(resumed)),
                )
            )
        )
        self._writer.flush()
        atexit.register(self.close)

    def _beat(self, db: sqlite3.Connection) -> None:
        if not self._closed:  # then it says how the run ended
            write_progress(db, self._progress)

    def _note_versions(self) -> None:
        """Record an event when the run is resumed with other library versions than it began with."""
        try:
            before = json.loads((self.folder / VERSIONS).read_text())
        except (OSError, ValueError):
            before = {}
        changed = {name: f"{before.get(name)} → {now}" for name, now in _versions().items() if before.get(name) != now}
        if changed:
            listed = ", ".join(f"{name} {change}" for name, change in changed.items())
            self.event("versions", f"resumed with other versions than the run began with: {listed}")

    def _write(self, split: str, step: int, metrics: dict[str, float], groups: Iterable[Group]) -> None:
        step, now, kept = int(step), time.time(), list(groups)
        values = {text(name): number(value) for name, value in metrics.items()}
        self._media.add(kept)
        self._writer.submit(lambda db: write_record(db, split, step, now, values, kept))


def _holds_a_run(folder: Path) -> bool:
    """True also for a database with steps whose configuration is gone: it is not written over."""
    if (folder / CONFIG).exists():
        return True
    if not (folder / DATABASE).exists():
        return False
    try:
        return any(True for _ in read_rows(folder, "metrics"))
    except StoreError:
        return True


def _ignore(_: object) -> None:
    """Jobs return nothing."""


def _versions() -> dict[str, Any]:
    return {"machine": platform.platform(), "cpus": os.cpu_count(), **library_versions()}
