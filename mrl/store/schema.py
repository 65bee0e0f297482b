"""The run's SQLite file: its tables, its version, and opening it."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

from mrl.errors import StoreError

DATABASE = "run.db"
VERSION = 3
"""Of the tables below. A change to them raises it."""
OLDEST = 1
"""The oldest version that can be read, and is brought up to date when a run is resumed: version 1 has no `progress`,
versions 1 and 2 have no policy versions and none of the indexes in LOOKING."""
APPLICATION_ID = 0x6D726C31
"""Marks the file as ours ("mrl1")."""
BUSY_SECONDS = 60.0

PROGRESS = """
CREATE TABLE progress (                -- one row, written over while the run goes on: what it is doing now
    id INTEGER PRIMARY KEY CHECK (id = 1),
    heartbeat REAL NOT NULL,           -- when the process that writes was last alive
    step INTEGER NOT NULL,             -- under way
    stage TEXT NOT NULL,               -- loading, generating, scoring, training …; the run's status when it has ended
    since REAL NOT NULL,               -- when the stage began
    groups_done INTEGER NOT NULL,      -- of the step (or evaluation): generated and scored
    groups_wanted INTEGER NOT NULL,
    tokens INTEGER NOT NULL,           -- sampled since the step began
    in_flight INTEGER NOT NULL,        -- attempts that have begun and not ended
    workers TEXT NOT NULL              -- JSON: of each its name, whether it is alive, the version it serves, restarts
);
"""

LOOKING = """
CREATE INDEX rollouts_truncated ON rollouts (step_id) WHERE finish_reason = 'length';
CREATE INDEX rollouts_by_version ON rollouts (policy_version, step_id);
CREATE INDEX rollouts_by_tokens ON rollouts (tokens, step_id);
CREATE INDEX rollouts_by_advantage ON rollouts (advantage, step_id);
"""
"""For filters and orders of whoever looks at rollouts."""

TABLES = f"""
CREATE TABLE run (                     -- one row
    id INTEGER PRIMARY KEY CHECK (id = 1),
    status TEXT NOT NULL,              -- running, finished, interrupted, failed
    error TEXT,
    pid INTEGER NOT NULL,
    host TEXT NOT NULL,                -- the machine's name, for people; run.lock says which machine it was
    created REAL NOT NULL,             -- seconds since 1970, as every time here
    started REAL NOT NULL,             -- of the process that writes now, or wrote last
    ended REAL,
    resumes INTEGER NOT NULL DEFAULT 0
);

-- The id carries step and split, so that everything below is in the run's order by its id alone:
-- id = 2 * step for training, 2 * step + 1 for the held-out evaluation after that step.
CREATE TABLE steps (
    id INTEGER PRIMARY KEY,
    split TEXT NOT NULL CHECK (split IN ('train', 'eval')),
    step INTEGER NOT NULL CHECK (step >= 0 AND id = 2 * step + (split = 'eval')),
    time REAL NOT NULL,
    rollouts INTEGER NOT NULL,         -- how many; with the next three, pages skip steps that hold nothing of interest
    failed INTEGER NOT NULL,
    reward_min REAL,
    reward_max REAL
);

CREATE TABLE metrics (                 -- not-a-number is the text 'nan': SQLite has no such number and would store NULL
    name TEXT NOT NULL,
    step_id INTEGER NOT NULL REFERENCES steps ON DELETE CASCADE,
    value REAL,
    PRIMARY KEY (name, step_id)
) WITHOUT ROWID;
CREATE INDEX metrics_by_step ON metrics (step_id);

CREATE TABLE tasks (                   -- a task whose content changed is another row
    key INTEGER PRIMARY KEY,
    id TEXT NOT NULL,
    digest BLOB NOT NULL,
    content BLOB NOT NULL,             -- deflated JSON: prompt, columns
    UNIQUE (id, digest)
);

CREATE TABLE rollouts (                -- what lists and filters need; the rest is in `contents`
    key INTEGER PRIMARY KEY,
    step_id INTEGER NOT NULL REFERENCES steps ON DELETE CASCADE,
    task_key INTEGER NOT NULL REFERENCES tasks,
    group_index INTEGER NOT NULL,      -- which group of the step
    id TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    status TEXT NOT NULL,
    error TEXT,
    reward REAL,
    advantage REAL,
    tokens INTEGER NOT NULL,           -- completion tokens over all samples
    finish_reason TEXT,                -- of the last sample
    rewards TEXT NOT NULL,             -- JSON: by reward function
    policy_version INTEGER             -- the newest that sampled a token of it; NULL where none was sampled
);
CREATE INDEX rollouts_by_step ON rollouts (step_id);
CREATE INDEX rollouts_by_task ON rollouts (task_key, step_id);
CREATE INDEX rollouts_by_reward ON rollouts (reward, step_id);
CREATE INDEX rollouts_failed ON rollouts (step_id) WHERE status = 'failed';
{LOOKING}
CREATE TABLE contents (
    key INTEGER PRIMARY KEY REFERENCES rollouts ON DELETE CASCADE,
    texts BLOB NOT NULL,               -- deflated JSON: messages, step rewards, metrics, extra columns, timings
    samples BLOB NOT NULL              -- see mrl/store/arrays.py
);

CREATE TABLE events (
    id INTEGER PRIMARY KEY,
    time REAL NOT NULL,
    step INTEGER,
    kind TEXT NOT NULL,
    message TEXT NOT NULL,
    details TEXT NOT NULL              -- JSON
);
CREATE INDEX events_by_step ON events (step);
{PROGRESS}"""


def create_database(folder: Path) -> None:
    """Put an empty database into `folder`, whole or not at all. Raises sqlite3.Error or OSError."""
    partial = folder / f"{DATABASE}.partial"
    partial.unlink(missing_ok=True)
    connection = sqlite3.connect(partial, isolation_level=None)
    try:
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {VERSION}")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.executescript(f"BEGIN; {TABLES} COMMIT;")
    finally:
        connection.close()
    os.replace(partial, folder / DATABASE)


def open_writer(folder: Path) -> sqlite3.Connection:
    """The connection of the run's only writer. Raises StoreError for a store of another version."""
    check_version(folder)
    connection = sqlite3.connect(folder / DATABASE, isolation_level=None, check_same_thread=False, timeout=BUSY_SECONDS)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute(f"PRAGMA journal_size_limit = {64 << 20}")
    found = connection.execute("PRAGMA user_version").fetchone()[0]
    if found < VERSION:
        added = f"{PROGRESS if found < 2 else ''} ALTER TABLE rollouts ADD COLUMN policy_version INTEGER; {LOOKING}"
        connection.executescript(f"BEGIN IMMEDIATE; {added} PRAGMA user_version = {VERSION}; COMMIT;")
    return connection


def open_reader(folder: Path) -> sqlite3.Connection:
    """A connection that only reads. Raises StoreError when there is no store, or one of another version."""
    check_version(folder)
    return _connect_reader(folder)


def version_of(folder: Path) -> int | None:
    """The version of the store in `folder`, None where there is none. Raises StoreError."""
    if not (folder / DATABASE).is_file():
        return None
    try:
        connection = _connect_reader(folder)
        try:
            application = connection.execute("PRAGMA application_id").fetchone()[0]
            version = int(connection.execute("PRAGMA user_version").fetchone()[0])
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise StoreError(f"{folder / DATABASE} cannot be opened ({error})") from None
    if application != APPLICATION_ID:
        raise StoreError(f"{folder / DATABASE} is not the record of a run")
    return version


def check_version(folder: Path) -> None:
    """Raises StoreError, with what to do, unless the store in `folder` can be read."""
    version = version_of(folder)
    if version is None:
        raise StoreError(f"{folder} holds no record of a run ({DATABASE} is missing)")
    if version < OLDEST:
        raise StoreError(
            f"{folder} was written by an older mrl (store version {version}, this one reads {VERSION}); "
            "read it with that one"
        )
    if version > VERSION:
        raise StoreError(
            f"{folder} was written by a newer mrl (store version {version}, this one reads {VERSION}); "
            "use that one: `pip install --upgrade mrl`"
        )


def _connect_reader(folder: Path) -> sqlite3.Connection:
    uri = (folder / DATABASE).absolute().as_uri()
    connection = sqlite3.connect(
        f"{uri}?mode=ro", uri=True, isolation_level=None, check_same_thread=False, timeout=BUSY_SECONDS
    )
    try:
        connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        return connection
    except sqlite3.OperationalError:
        connection.close()
        wal = folder / f"{DATABASE}-wal"
        if os.access(folder, os.W_OK) or (wal.exists() and wal.stat().st_size):
            raise
    # A folder that cannot be written to: nobody else writes either, so SQLite may do without its shared memory.
    return sqlite3.connect(f"{uri}?immutable=1", uri=True, isolation_level=None, check_same_thread=False)
