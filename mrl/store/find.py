"""Runs on this machine: where they are and how they are doing."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mrl.errors import StoreError
from mrl.store.lock import is_locked
from mrl.store.read import RunReader

Status = Literal["running", "finished", "interrupted", "failed", "died", "unknown", "unreadable"]
REWARD = "reward/mean"
EVAL_REWARD = "eval/mean"


@dataclass
class RunSummary:
    """One line of a list of runs."""

    name: str
    folder: Path
    status: Status
    """`died`: its process is gone without having said how it ended. `unknown`: it was written on another machine, which
    does not hold the lock as seen from here. `unreadable`: see `error`."""
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
            recorded = reader.run()
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
    summary.status = _status(run, recorded.get("status", "running"), recorded.get("host"))
    return summary


def _status(run: Path, recorded: Status, host: str | None) -> Status:
    if is_locked(run):
        return "running"
    if recorded != "running":
        return recorded
    return "died" if host in (None, socket.gethostname()) else "unknown"


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
