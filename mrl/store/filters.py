"""Which rollouts, and the fastest way to a page of them."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from mrl.errors import StoreError
from mrl.store.rows import step_id_of, text

FEW = 5_000
"""Up to so many matching rows are sorted, instead of walking the run's steps."""
Order = Literal["step", "reward", "tokens", "advantage"]
"""What rollouts are sorted by, equal ones by the run's order. By reward or advantage, those without are left out."""
LOOKING_SINCE = 3
"""The version of the store from which on there are policy versions and the indexes for looking at rollouts."""


@dataclass(frozen=True)
class Filter:
    """What every rollout of a page has in common. None = any."""

    split: Literal["train", "eval"] = "train"
    step: int | None = None
    task_id: str | None = None
    status: Literal["ok", "failed"] | None = None
    reward_min: float | None = None
    """Lowest reward, itself included. A rollout without a reward is outside every range."""
    reward_max: float | None = None
    truncated: bool | None = None
    """Whether a limit of tokens, turns or time ended it."""
    policy_version: int | None = None
    """The newest that sampled a token of it."""

    @property
    def by_steps(self) -> bool:
        """Whether the rows in `steps` say how many rollouts there are."""
        return self.task_id is None and not self.by_reward and self.truncated is None and self.policy_version is None

    @property
    def by_reward(self) -> bool:
        """Whether there is a range of rewards."""
        return self.reward_min is not None or self.reward_max is not None


@dataclass(frozen=True)
class PageQuery:
    """Keys of a page, by `order`, then by step, then by key.

    In the run's order: a filter on the task, or on the policy version, walks that index, which has this order. A range
    of rewards that few rollouts fall into is read from the index of rewards and sorted. Everything else walks the
    steps, skipping those whose row in `steps` rules out a match. Other orders walk the index of
    what they sort by, unless a filter leaves few to sort.
    """

    where: Filter
    newest_first: bool = False
    after: tuple[int, int] | None = None
    offset: int = 0
    order: Order = "step"
    version: int = LOOKING_SINCE
    """Of the store."""

    def keys(self, db: sqlite3.Connection, limit: int) -> Iterator[tuple[int, int]]:
        """Up to `limit` (step id, key) pairs. Raises StoreError for a filter that the store knows nothing of."""
        if self.where.policy_version is not None and self.version < LOOKING_SINCE:
            raise StoreError(
                "policy_version: this run was recorded by an older mrl, without the policy versions of its rollouts; "
                "leave that filter out, or go on with the run: new steps will have them"
            )
        if self.order != "step":
            return self._by_value(db, limit)
        if self.where.policy_version is not None:
            return self._of_version(db, limit)
        if self._sorts(db):
            return self._sorted(db, limit)
        if self.where.task_id is not None:
            return self._of_task(db, limit)
        return self._along_steps(db, limit)

    def count(self, db: sqlite3.Connection, limit: int) -> int:
        """How many there are; with a filter on task or reward, counted no further than `limit`."""
        conditions, values = self._step_conditions()
        if self.where.by_steps:
            sql = f"SELECT coalesce(sum({self._counted}), 0) FROM steps AS s WHERE {conditions}"
            return int(db.execute(sql, values).fetchone()[0])
        rows = self.keys(db, limit)
        return sum(1 for _ in rows)

    # --- ways -------------------------------------------------------------------------------------------------------

    def _sorts(self, db: sqlite3.Connection) -> bool:
        if not self.where.by_reward or self.where.step is not None:
            return False
        conditions, values = self._reward_conditions()
        sql = f"SELECT count(*) FROM (SELECT 1 FROM rollouts AS r WHERE {conditions} LIMIT {FEW + 1})"
        return bool(db.execute(sql, values).fetchone()[0] <= FEW)

    def _sorted(self, db: sqlite3.Connection, limit: int) -> Iterator[tuple[int, int]]:
        conditions, values = self._rollout_conditions()
        if self.where.task_id is not None:
            conditions += " AND r.task_key IN (SELECT key FROM tasks WHERE id = ?)"
            values = [*values, text(self.where.task_id)]
        sql = f"""
            SELECT r.step_id, r.key FROM rollouts AS r INDEXED BY rollouts_by_reward
            WHERE r.step_id % 2 = ? AND {conditions} {self._order("r.step_id")} LIMIT ? OFFSET ?
        """
        return db.execute(sql, [self.where.split == "eval", *values, limit, self.offset])

    def _of_task(self, db: sqlite3.Connection, limit: int) -> Iterator[tuple[int, int]]:
        conditions, values = self._rollout_conditions()
        keys = [row[0] for row in db.execute("SELECT key FROM tasks WHERE id = ?", (text(self.where.task_id or ""),))]
        one_step = "" if self.where.step is None else "AND r.step_id = ?"
        step = [] if self.where.step is None else [step_id_of(self.where.split, self.where.step)]
        sql = f"""
            SELECT r.step_id, r.key FROM rollouts AS r INDEXED BY rollouts_by_task
            WHERE r.task_key IN ({", ".join(map(str, keys))}) AND r.step_id % 2 = ? {one_step} AND {conditions}
            {self._order("r.step_id")} LIMIT ? OFFSET ?
        """
        return db.execute(sql, [self.where.split == "eval", *step, *values, limit, self.offset])

    def _of_version(self, db: sqlite3.Connection, limit: int) -> Iterator[tuple[int, int]]:
        conditions, values = self._all_conditions()
        sql = f"""
            SELECT r.step_id, r.key FROM rollouts AS r INDEXED BY rollouts_by_version
            WHERE {conditions} {self._order("r.step_id")} LIMIT ? OFFSET ?
        """
        return db.execute(sql, [*values, limit, self.offset])

    def _by_value(self, db: sqlite3.Connection, limit: int) -> Iterator[tuple[int, int]]:
        conditions, values = replace(self, after=None)._all_conditions()
        if self.order != "tokens":
            conditions += f" AND typeof(r.{self.order}) = 'real'"
        if self.after:
            behind = f"(r.{self.order}, r.step_id, r.key) {self._onward} ((SELECT {self.order} FROM rollouts "
            conditions, values = (
                f"{conditions} AND {behind} WHERE key = ?), ?, ?)",
                [*values, self.after[1], *self.after],
            )
        sql = f"""
            SELECT r.step_id, r.key FROM rollouts AS r {self._index_of_order(db)} WHERE {conditions}
            ORDER BY r.{self.order} {self._direction}, r.step_id {self._direction}, r.key {self._direction}
            LIMIT ? OFFSET ?
        """
        return db.execute(sql, [*values, limit, self.offset])

    def _index_of_order(self, db: sqlite3.Connection) -> str:
        where = self.where
        if where.step is not None:
            return "INDEXED BY rollouts_by_step"
        if where.task_id is not None:
            return "INDEXED BY rollouts_by_task"
        if self._sorts(db):
            return "INDEXED BY rollouts_by_reward"
        if self.version < LOOKING_SINCE and (where.status != "failed"):
            return "INDEXED BY rollouts_by_reward" if self.order == "reward" else ""
        if where.policy_version is not None:
            return "INDEXED BY rollouts_by_version"
        if where.status == "failed":
            return "INDEXED BY rollouts_failed"
        return "INDEXED BY rollouts_truncated" if where.truncated else f"INDEXED BY rollouts_by_{self.order}"

    def _along_steps(self, db: sqlite3.Connection, limit: int) -> Iterator[tuple[int, int]]:
        steps, step_values = self._step_conditions()
        start, offset = self._skip_steps(db) if self.where.by_steps and not self.after else (None, self.offset)
        if start is not None:
            steps, step_values = f"{steps} AND s.id {self._onward}= ?", [*step_values, start]
        conditions, values = self._rollout_conditions()
        index = "INDEXED BY rollouts_truncated" if self.where.truncated and self.version >= LOOKING_SINCE else ""
        sql = f"""
            SELECT r.step_id, r.key FROM steps AS s CROSS JOIN rollouts AS r {index} ON r.step_id = s.id
            WHERE {steps} AND {conditions} {self._order("s.id")} LIMIT ? OFFSET ?
        """
        return db.execute(sql, [*step_values, *values, limit, offset])

    def _skip_steps(self, db: sqlite3.Connection) -> tuple[int | None, int]:
        """The step in which the offset falls, and what is left of the offset there."""
        left = self.offset
        if not left:
            return None, 0
        conditions, values = self._step_conditions()
        sql = f"SELECT s.id, {self._counted} FROM steps AS s WHERE {conditions} ORDER BY s.id {self._direction}"
        for step_id, count in db.execute(sql, values):
            if left < count:
                return step_id, left
            left -= count
        return None, self.offset

    # --- parts of SQL -----------------------------------------------------------------------------------------------

    @property
    def _direction(self) -> str:
        return "DESC" if self.newest_first else "ASC"

    @property
    def _onward(self) -> str:
        return "<" if self.newest_first else ">"

    @property
    def _counted(self) -> str:
        return {None: "s.rollouts", "failed": "s.failed", "ok": "s.rollouts - s.failed"}[self.where.status]

    def _order(self, step_id: str) -> str:
        return f"ORDER BY {step_id} {self._direction}, r.key {self._direction}"

    def _step_conditions(self) -> tuple[str, list[Any]]:
        where = self.where
        values: list[Any]
        conditions, values = ["s.id % 2 = ?"], [int(where.split == "eval")]
        if where.step is not None:
            conditions, values = ["s.id = ?"], [step_id_of(where.split, where.step)]
        if where.status is not None:
            conditions.append(f"{self._counted} > 0")
        if where.reward_min is not None:
            conditions, values = [*conditions, "s.reward_max >= ?"], [*values, where.reward_min]
        if where.reward_max is not None:
            conditions, values = [*conditions, "s.reward_min <= ?"], [*values, where.reward_max]
        if self.after:
            conditions, values = [*conditions, f"s.id {self._onward}= ?"], [*values, self.after[0]]
        return " AND ".join(conditions), values

    def _all_conditions(self) -> tuple[str, list[Any]]:
        """Of rollouts alone, without help of the table of steps."""
        conditions, values = self._rollout_conditions()
        conditions, values = f"r.step_id % 2 = ? AND {conditions}", [int(self.where.split == "eval"), *values]
        if self.where.step is not None:
            conditions, values = (
                f"{conditions} AND r.step_id = ?",
                [*values, step_id_of(self.where.split, self.where.step)],
            )
        if self.where.task_id is not None:
            conditions += " AND r.task_key IN (SELECT key FROM tasks WHERE id = ?)"
            values = [*values, text(self.where.task_id)]
        return conditions, values

    def _rollout_conditions(self) -> tuple[str, list[Any]]:
        conditions, values = self._reward_conditions()
        if self.where.status is not None:
            conditions += f" AND r.status = '{'failed' if self.where.status == 'failed' else 'ok'}'"
        if self.where.truncated is not None:
            conditions += (
                " AND r.finish_reason = 'length'" if self.where.truncated else " AND r.finish_reason IS NOT 'length'"
            )
        if self.where.policy_version is not None:
            conditions, values = f"{conditions} AND r.policy_version = ?", [*values, self.where.policy_version]
        if self.after:
            conditions += f" AND (r.step_id, r.key) {self._onward} (?, ?)"
            values = [*values, *self.after]
        return conditions, values

    def _reward_conditions(self) -> tuple[str, list[Any]]:
        conditions: list[str] = ["TRUE"]
        values: list[Any] = []
        if self.where.by_reward:
            conditions.append("typeof(r.reward) = 'real'")
        if self.where.reward_min is not None:
            conditions, values = [*conditions, "r.reward >= ?"], [*values, self.where.reward_min]
        if self.where.reward_max is not None:
            conditions, values = [*conditions, "r.reward <= ?"], [*values, self.where.reward_max]
        return " AND ".join(conditions), values
