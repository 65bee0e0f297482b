"""Stores of older versions, made into today's.

MIGRATIONS holds one function per old version, each from that version to the next. What a function replaces stays until
its result is whole, so one that is killed can be started again.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from mrl.errors import StoreError
from mrl.store.lock import RunLock
from mrl.store.record import write_record
from mrl.store.rows import number, text, to_json
from mrl.store.schema import DATABASE, LEGACY_FILES, VERSION, check_version, create_database, version_of
from mrl.types import Group, Rollout, Sample, Task

LEGACY = "before-migration"
"""Where the files of version 0 go; nothing reads them any more."""


def migrate(folder: Path) -> int:
    """Bring the store in `folder` to this version; the version it had.

    Raises StoreError when there is none, or one that is not older, or somebody is writing it.
    """
    lock = RunLock(folder)
    try:
        found = version_of(folder)
        if found is None or found >= VERSION:
            check_version(folder)
            raise StoreError(f"{folder} is of store version {VERSION} and needs no conversion")
        for version in range(found, VERSION):
            try:
                MIGRATIONS[version](folder)
            except (OSError, sqlite3.Error) as error:
                raise StoreError(f"{folder} could not be converted from store version {version} ({error})") from error
        return found
    finally:
        lock.release()


# --- 0 to 1: JSON lines to SQLite -------------------------------------------------------------------------------------


def _from_json_lines(folder: Path) -> None:
    building = folder / "migrating"
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir()
    create_database(building)
    db = sqlite3.connect(building / DATABASE, isolation_level=None)
    try:
        db.execute("BEGIN")
        _import(folder, db)
        db.execute("COMMIT")
    finally:
        db.close()
    os.replace(building / DATABASE, folder / DATABASE)
    shutil.rmtree(building)
    (folder / LEGACY).mkdir(exist_ok=True)
    for name in LEGACY_FILES:
        if (folder / name).exists():
            os.replace(folder / name, folder / LEGACY / name)


def _import(folder: Path, db: sqlite3.Connection) -> None:
    events = list(_lines(folder / "events.jsonl"))
    for event in events:
        values = (event.pop("time"), event.pop("step", None), event.pop("kind"), event.pop("message"))
        details = text(to_json(event).decode("utf-8", "surrogatepass"))
        db.execute("INSERT INTO events (time, step, kind, message, details) VALUES (?, ?, ?, ?, ?)", (*values, details))
    first, last = math.inf, 0.0
    for split, prefix in (("train", ""), ("eval", "eval_")):
        metrics = {row["step"]: row for row in _lines(folder / f"{prefix}metrics.jsonl")}
        first = min([first, *(row["time"] for row in metrics.values())])
        last = max([last, *(row["time"] for row in metrics.values())])
        rows = groupby(_lines(folder / f"{prefix}rollouts.jsonl"), key=lambda row: row["step"])
        seen = set()
        for step, rollouts in rows:
            _import_step(db, split, metrics.get(step), rollouts)
            seen.add(step)
        for step in metrics.keys() - seen:
            _import_step(db, split, metrics[step], [])
    first = first if math.isfinite(first) else 0.0
    db.execute(
        "INSERT INTO run (id, status, pid, host, created, started, ended) VALUES (1, 'interrupted', 0, ?, ?, ?, ?)",
        (socket.gethostname(), first, first, last or first),
    )


def _import_step(
    db: sqlite3.Connection, split: str, metrics: dict[str, Any] | None, rows: Iterable[dict[str, Any]]
) -> None:
    """A step without metrics was being written when the process was killed: it is left out."""
    if metrics is None:
        for _ in rows:
            pass
        return
    values = {name: number(_value(value)) for name, value in metrics.items() if name not in ("step", "time")}
    write_record(db, split, metrics["step"], metrics["time"], values, list(_groups(rows)))


def _groups(rows: Iterable[dict[str, Any]]) -> Iterator[Group]:
    for task_id, attempts in groupby(rows, key=lambda row: row["task_id"]):
        rollouts = []
        for row in attempts:
            row.pop("step")
            samples = [Sample(**_floats(sample)) for sample in row.pop("samples")]
            rollouts.append(Rollout(**_floats(row), samples=samples))
        yield Group(Task(task_id, rollouts[0].prompt), rollouts)


def _floats(row: dict[str, Any]) -> dict[str, Any]:
    """Numbers that are not finite were written by name."""
    row = dict(row)
    for name in ("reward", "advantage"):
        if name in row:
            row[name] = _value(row[name])
    if "logprobs" in row:
        row["logprobs"] = [_value(value) for value in row["logprobs"]]
    return row


def _value(value: Any) -> Any:
    return float(value) if value in ("nan", "inf", "-inf") else value


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a file; its last line may be cut where the process was killed."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n"):
                yield json.loads(line)


MIGRATIONS: dict[int, Callable[[Path], None]] = {0: _from_json_lines}
