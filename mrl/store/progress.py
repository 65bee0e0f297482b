"""What a run is doing now: one row, written over several times a second, that other processes can look at."""

from __future__ import annotations

import json
import sqlite3
import time
from dataclasses import dataclass, field
from typing import Any

from mrl.store.rows import text


@dataclass
class WorkerHealth:
    """One worker, as the run last saw it."""

    name: str
    alive: bool = True
    version: int | None = None
    """The policy version it serves; None for a worker that serves none, and before the first weights."""
    restarts: int = 0
    """How often it was replaced by a new one."""


@dataclass
class Progress:
    """Where a run is inside its current step."""

    step: int = 0
    """The step that is under way; 0 before the first."""
    stage: str = "starting"
    """loading, generating, scoring, training, syncing, evaluating, saving …; when the run has ended, how it did."""
    since: float = field(default_factory=time.time)
    """When the stage began; seconds since 1970."""
    groups_done: int = 0
    """Groups of the step, or of the evaluation, that are generated and scored."""
    groups_wanted: int = 0
    tokens: int = 0
    """Sampled since the step began, as far as the engines count them."""
    in_flight: int = 0
    """Attempts that have begun and not ended, those for later steps included."""
    workers: list[WorkerHealth] = field(default_factory=list)


Row = tuple[int, str, float, int, int, int, int, str]
"""The values of `progress`, without its heartbeat."""


def progress_row(progress: Progress) -> Row:
    """An immutable copy."""
    return (
        int(progress.step),
        text(progress.stage),
        progress.since,
        int(progress.groups_done),
        int(progress.groups_wanted),
        int(progress.tokens),
        int(progress.in_flight),
        json.dumps([vars(worker) for worker in progress.workers]),
    )


def write_progress(db: sqlite3.Connection, row: Row) -> None:
    """Replace the row, with now as the heartbeat."""
    db.execute("INSERT OR REPLACE INTO progress VALUES (1, ?, ?, ?, ?, ?, ?, ?, ?, ?)", (time.time(), *row))


def close_progress(db: sqlite3.Connection, stage: str) -> None:
    """The run has ended; what it was doing stays as it was."""
    now = time.time()
    db.execute("UPDATE progress SET heartbeat = ?, stage = ?, since = ?, in_flight = 0", (now, text(stage), now))


def read_progress(row: sqlite3.Row) -> dict[str, Any]:
    """The fields of `Progress`, workers as dicts, and `heartbeat`."""
    found = dict(row) | {"workers": json.loads(row["workers"])}
    del found["id"]
    return found
