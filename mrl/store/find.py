"""Runs on this machine: where they are and how they are doing."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mrl.errors import StoreError
from mrl.store.lock import is_locked, machine_of_writer
from mrl.store.read import RunReader
from mrl.system.machine import booted, on_this_kernel

RunStatus = Literal["running", "finished", "interrupted", "failed", "died", "unknown", "unreadable"]
REWARD = "reward/mean"
EVAL_REWARD = "eval/mean"
COST = "cost/dollars"
"""Of a run since its beginning; only where its backend knows prices."""
SILENT_SECONDS = 60.0
"""Without a heartbeat for so long, a run gives no sign of life: many heartbeats, and more than a large step's write."""


@dataclass
class RunSummary:
    """One line of a list of runs."""

    name: str
    folder: Path
    status: RunStatus
    """`running`: its process holds the run's lock, or, on another machine, whose lock is not seen from here, gave a
    sign of life a moment ago. `died`: its process is gone without having said how it ended. `unknown`: on another
    machine, and without a sign of life. `unreadable`: see `error`."""
    error: str | None = None
    steps: int = 0
    reward: float | None = None
    """Mean reward of the last step."""
    best_eval: float | None = None
    """Highest mean reward of a held-out evaluation."""
    best_eval_step: int | None = None
    created: float | None = None
    """Seconds since 1970."""
    ended: float | None = None
    pid: int | None = None
    host: str | None = None
    resumes: int = 0
    bytes: int = 0
    """Of everything in the folder, checkpoints included."""
    progress: dict[str, Any] | None = None
    """What it is doing, or did last: see `RunReader.progress`."""

    @property
    def silent_since(self) -> float | None:
        """When a run that should be running gave its last sign of life (seconds since 1970), if that is long ago."""
        if self.progress is None or self.status not in ("running", "unknown") or _is_recent(self.progress):
            return None
        heartbeat: float = self.progress["heartbeat"]
        return heartbeat


def runs_root() -> Path:
    """The folder runs go to when none is named: $MRL_RUNS or ./runs."""
    return Path(os.environ.get("MRL_RUNS", "runs"))


def find_run(name: str) -> Path | None:
    """The folder of the run called `name`, or at that path; None when there is none."""
    for folder in (Path(name).expanduser(), runs_root() / name):
        if _is_run(folder):
            return folder
    return None


def shortest_name(run: Path) -> str:
    """What commands know a run by: its name, or its path where the name would say something else."""
    name = run.name
    taken = name == "starter" or name.startswith("-") or "@" in name
    found = None if taken else find_run(name)
    if found is None or found.resolve() != run.resolve() or (Path(name).exists() and not _is_run(Path(name))):
        return str(run)
    return name


def all_runs(root: Path | None = None) -> list[Path]:
    """The folders of all runs below `root` (default: `runs_root()`), oldest first."""
    root = root or runs_root()
    folders = [folder for folder in root.iterdir() if _is_run(folder)] if root.is_dir() else []
    return sorted(folders, key=lambda folder: ((folder / "config.yaml").stat().st_mtime, folder.name))


def summarize(run: Path) -> RunSummary:
    """How a run is doing. Never raises for its store: what cannot be read is said in the summary."""
    summary = RunSummary(run.name, run, "unreadable", bytes=_size(run))
    try:
        with RunReader(run) as reader:
            recorded, summary.progress = reader.run(), reader.progress()
            summary.steps = reader.last_step() or 0
            rewards = reader.series(REWARD)
            evals = [pair for pair in reader.series(EVAL_REWARD, "eval") if pair[1] == pair[1]]
    except StoreError as error:
        summary.error = str(error)
        return summary
    summary.reward = rewards[-1][1] if rewards else None
    if evals:
        summary.best_eval_step, summary.best_eval = max(evals, key=lambda pair: pair[1])
    for name in ("error", "created", "ended", "pid", "host", "resumes"):
        setattr(summary, name, recorded.get(name))
    summary.status = _status(run, recorded.get("status", "running"), recorded.get("host"), summary.progress)
    return summary


def _status(run: Path, recorded: RunStatus, host: str | None, progress: dict[str, Any] | None) -> RunStatus:
    if is_locked(run):
        return "running"
    if recorded != "running":
        return recorded
    if _was_written_here(run, host, progress):  # the lock went with its process
        return "died"
    return "running" if _is_recent(progress) else "unknown"


def _was_written_here(run: Path, host: str | None, progress: dict[str, Any] | None) -> bool:
    """Whether the process that wrote last was on this machine, so that its lock would be seen from here.

    A name says it only of older runs, whose locks say no more, and of a run that was last heard of before this machine
    was booted.
    """
    machine = machine_of_writer(run)
    if machine is not None and on_this_kernel(machine):
        return True
    if host not in (None, socket.gethostname()):
        return False
    return machine is None or (progress is not None and progress["heartbeat"] < booted())


def _is_recent(progress: dict[str, Any] | None) -> bool:
    return progress is not None and time.time() - progress["heartbeat"] < SILENT_SECONDS


def _is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file() and (folder / "checkpoints").is_dir()


def _size(folder: Path) -> int:
    return sum(_size_of(Path(root) / name for name in names) for root, _, names in os.walk(folder))


def _size_of(paths: Iterable[Path]) -> int:
    total = 0
    for path in paths:
        try:
            total += path.lstat().st_size
        except OSError:  # gone meanwhile: the run is being written
            continue
    return total
