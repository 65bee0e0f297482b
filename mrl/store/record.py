"""A step's rows in the database."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

from mrl.store.rows import ROLLOUT_COLUMNS, content_row, rollout_row, step_id_of, task_row
from mrl.types import Group

INSERT_ROLLOUT = f"INSERT INTO rollouts ({', '.join(ROLLOUT_COLUMNS)}) VALUES ({', '.join('?' * len(ROLLOUT_COLUMNS))})"


def write_record(
    db: sqlite3.Connection, split: str, step: int, when: float, metrics: dict[str, Any], groups: Sequence[Group]
) -> None:
    """Put a step into the database, replacing what it has for that step. Not a transaction by itself."""
    step_id = step_id_of(split, step)
    rollouts = [(index, group.task, rollout) for index, group in enumerate(groups) for rollout in group.rollouts]
    rewards = [r.reward for _, _, r in rollouts if r.reward is not None and r.reward == r.reward]
    db.execute("DELETE FROM steps WHERE id = ?", (step_id,))
    db.execute(
        "INSERT INTO steps VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (
            *(step_id, split, step, when, len(rollouts)),
            sum(r.status == "failed" for _, _, r in rollouts),
            *((float(min(rewards)), float(max(rewards))) if rewards else (None, None)),
        ),
    )
    db.executemany("INSERT INTO metrics VALUES (?, ?, ?)", [(name, step_id, v) for name, v in metrics.items()])
    task_keys = [_task_key(db, group) for group in groups]
    first = db.execute("SELECT coalesce(max(key), 0) + 1 FROM rollouts").fetchone()[0]
    numbered = list(enumerate(rollouts, first))
    db.executemany(
        INSERT_ROLLOUT, (rollout_row(r, key, step_id, task_keys[index], index) for key, (index, _, r) in numbered)
    )
    db.executemany(
        "INSERT INTO contents VALUES (?, ?, ?)", (content_row(r, key, task) for key, (_, task, r) in numbered)
    )


def _task_key(db: sqlite3.Connection, group: Group) -> int:
    task_id, digest, content = task_row(group.task)
    found = db.execute("SELECT key FROM tasks WHERE id = ? AND digest = ?", (task_id, digest)).fetchone()
    if found is None:
        cursor = db.execute("INSERT INTO tasks (id, digest, content) VALUES (?, ?, ?)", (task_id, digest, content))
        return int(cursor.lastrowid or 0)
    return int(found[0])
