"""Reading a run's store, while it is written or afterwards.

Pages follow the run's order (step, then the order within the step) and are asked for by where the last one ended, so a
page costs the same at any depth.
"""

from __future__ import annotations

import itertools
import json
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from mrl.errors import StoreError
from mrl.store.filters import Filter, Order, PageQuery
from mrl.store.progress import read_progress
from mrl.store.rows import read_number, read_rollout, read_summary, read_task, step_id_of, text
from mrl.store.schema import DATABASE, open_reader, version_of

Split = Literal["train", "eval"]
DROPPED = "dropped: "
"""Prefix of the error of a rollout that was too stale to be trained on."""
UNUSED = "unused: "
"""Prefix of the error of a rollout that ended when its step had enough groups."""
CHUNK = 64
"""Rollouts read at a time when all are wanted."""
STEPS_CHUNK = 256
"""Steps whose metrics are read at a time when all are wanted."""
COUNT_LIMIT = 10_000


class Cursor(NamedTuple):
    """Where a page ended."""

    step_id: int
    key: int


@dataclass
class Page:
    """Some rollouts' summaries."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    next: Cursor | None = None
    """Give it as `after` to get the following page; None = this was the last."""


class RunReader:
    """Reads one run. Any number may be open; one may be shared between threads. Use it as a context manager.

    Every method raises StoreError when the file cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        """Raises StoreError when the folder has no store, or one of another version (with the command to use)."""
        self.folder = folder
        self._connection = open_reader(folder)
        self._connection.row_factory = sqlite3.Row
        self._one_at_a_time = threading.RLock()
        self.version: int = self._one("PRAGMA user_version")
        """Of the store."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    # --- the run ----------------------------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Status as last written, error, pid, host, times (seconds since 1970), resumes; {} before the first write."""
        rows = self._all("SELECT status, error, pid, host, created, started, ended, resumes FROM run")
        return dict(rows[0]) if rows else {}

    def progress(self, since: float = 0.0) -> dict[str, Any] | None:
        """What the run is doing now, or did last: the fields of `mrl.store.progress.Progress`, workers as dicts, and
        `heartbeat`, when its process was last alive (seconds since 1970).

        None when there is nothing newer than the heartbeat `since`, or the run was recorded before progress was kept.
        """
        if not self._one("SELECT count(*) FROM sqlite_schema WHERE name = 'progress'"):
            return None
        rows = self._all("SELECT * FROM progress WHERE heartbeat > ?", (since,))
        return read_progress(rows[0]) if rows else None

    def last_step(self, split: Split = "train") -> int | None:
        """The newest step on record."""
        return self._one("SELECT max(step) FROM steps WHERE id % 2 = ?", (split == "eval",))

    def steps(self, split: Split = "train") -> list[dict[str, Any]]:
        """Every step: step, time, number of rollouts and of failed ones, lowest and highest reward."""
        sql = "SELECT step, time, rollouts, failed, reward_min, reward_max FROM steps WHERE id % 2 = ? ORDER BY id"
        return [dict(row) for row in self._all(sql, (split == "eval",))]

    # --- metrics ----------------------------------------------------------------------------------------------------

    def metric_names(self, split: Split = "train") -> list[str]:
        """Every metric that was ever recorded."""
        sql = "SELECT name, max(step_id % 2 = ?) AS there FROM metrics GROUP BY name ORDER BY name"
        return [row["name"] for row in self._all(sql, (split == "eval",)) if row["there"]]

    def series(self, name: str, split: Split = "train", since: int = -1) -> list[tuple[int, float]]:
        """A metric by step, in order, of the steps after `since`. What was not a number is NaN; a step that did not
        record it is absent.

        A run that went back to a checkpoint repeats steps: a reader that polls with `since` starts over when
        `run()["resumes"]` has changed.
        """
        sql = (
            "SELECT step_id / 2 AS step, value FROM metrics "
            "WHERE name = ? AND step_id > ? AND step_id % 2 = ? ORDER BY step_id"
        )
        rows = self._all(sql, (text(name), step_id_of("eval", since), split == "eval"))
        return [(row["step"], read_number(row["value"])) for row in rows]

    def all_series(self, split: Split = "train", since: int = -1) -> dict[str, list[tuple[int, float]]]:
        """`series` of every metric, by name, in one query; {} when no step after `since` was recorded."""
        index = "" if since < 0 else "INDEXED BY metrics_by_step"  # a few steps out of many, rather than every metric
        sql = (
            f"SELECT name, step_id / 2 AS step, value FROM metrics {index} "
            "WHERE step_id > ? AND step_id % 2 = ? ORDER BY name, step_id"
        )
        rows = self._tuples(sql, (step_id_of("eval", since), split == "eval"))
        return {
            name: [(step, read_number(value)) for _, step, value in group]
            for name, group in itertools.groupby(rows, key=itemgetter(0))
        }

    def metrics(self, step: int, split: Split = "train") -> dict[str, float]:
        """Every metric of a step; {} when there is no such step."""
        rows = self._all("SELECT name, value FROM metrics WHERE step_id = ?", (step_id_of(split, step),))
        return {row["name"]: read_number(row["value"]) for row in rows}

    def metric_rows(self, split: Split = "train", since: int = -1) -> Iterator[dict[str, Any]]:
        """Every step after `since` as one flat dict: step, time and each metric. Some hundred steps in one query."""
        while True:
            with self._snapshot():
                steps = self._all(
                    "SELECT id, step, time FROM steps WHERE id > ? AND id % 2 = ? ORDER BY id LIMIT ?",
                    (step_id_of("eval", since), split == "eval", STEPS_CHUNK),
                )
                rows = {step["id"]: {"step": step["step"], "time": step["time"]} for step in steps}
                for name, step_id, value in self._metrics_of(list(rows)):
                    rows[step_id][name] = read_number(value)
            yield from rows.values()
            if len(rows) < STEPS_CHUNK:
                return
            since = steps[-1]["step"]

    # --- rollouts ---------------------------------------------------------------------------------------------------

    def page(
        self,
        where: Filter | None = None,
        *,
        limit: int = 50,
        after: tuple[int, int] | None = None,
        offset: int = 0,
        newest_first: bool = False,
        order: Order = "step",
    ) -> Page:
        """Summaries of the rollouts that `where` lets through, in the run's order or by another value.

        after: a page's `next`. offset: skip that many more; cheap where `where` names at most split, step and status.
        newest_first: last first, or the highest value first. order: by reward or advantage, those without are left out.
        """
        query = PageQuery(where or Filter(), newest_first, after, offset, order, self.version)
        with self._snapshot():
            keys = [Cursor(*row) for row in query.keys(self._connection, limit + 1)]
            rows = self.summaries([cursor.key for cursor in keys[:limit]])
        return Page(rows, keys[limit - 1] if len(keys) > limit else None)

    def page_of_texts(
        self,
        where: Filter | None = None,
        *,
        limit: int,
        after: tuple[int, int] | None = None,
        newest_first: bool = False,
        order: Order = "step",
    ) -> tuple[list[tuple[Cursor, bytes]], Cursor | None]:
        """As `page`, without summaries: each rollout's place and its packed messages; and the page's `next`."""
        query = PageQuery(where or Filter(), newest_first, after, 0, order, self.version)
        with self._snapshot():
            keys = [Cursor(*row) for row in query.keys(self._connection, limit + 1)]
            texts = self.texts([cursor.key for cursor in keys[:limit]])
        found = [(cursor, texts[cursor.key]) for cursor in keys[:limit] if cursor.key in texts]
        return found, keys[limit - 1] if len(keys) > limit else None

    def summaries(self, keys: list[int]) -> list[dict[str, Any]]:
        """Of these rollouts, in this order; those that are gone are left out."""
        sql = "SELECT r.*, t.id AS task_id FROM rollouts AS r JOIN tasks AS t ON t.key = r.task_key WHERE r.key IN ({})"
        return [read_summary(dict(row)) for row in self._by_key(sql, keys)]

    def count(self, where: Filter | None = None, limit: int = COUNT_LIMIT) -> int:
        """How many rollouts `where` lets through. Filters on task or reward count no further than `limit`."""
        with self._snapshot():
            return PageQuery(where or Filter(), version=self.version).count(self._connection, limit)

    def rollout(self, key: int) -> dict[str, Any]:
        """One rollout in full: every field of `mrl.types.Rollout`, samples as dicts. Raises StoreError: no such key."""
        found = self._in_full([key])
        if not found:
            raise StoreError(f"{self.folder}: there is no rollout {key}")
        return found[0]

    def rollouts(self, where: Filter | None = None, newest_first: bool = False) -> Iterator[dict[str, Any]]:
        """Every rollout in full, a chunk in memory at a time."""
        after: tuple[int, int] | None = None
        while True:
            query = PageQuery(where or Filter(), newest_first, after, version=self.version)
            with self._snapshot():
                keys = list(query.keys(self._connection, CHUNK))
                rows = self._in_full([key for _, key in keys])
            yield from rows
            if len(keys) < CHUNK:
                return
            after = keys[-1]

    def texts(self, keys: list[int]) -> dict[int, bytes]:
        """Messages and the like of these rollouts, packed as they are stored, by key."""
        listed = ", ".join(map(str, map(int, keys)))
        return dict(self._tuples(f"SELECT key, texts FROM contents WHERE key IN ({listed})", ()))

    def failures(self, split: Split = "train") -> tuple[dict[str, int], int]:
        """Errors of failed rollouts with their counts, and the number of all rollouts; those dropped as stale or unused
        are in neither."""
        sql = (
            "SELECT coalesce(error, '') AS error, count(*) AS count FROM rollouts "
            "WHERE status = 'failed' AND step_id % 2 = ? GROUP BY 1 ORDER BY 2 DESC"
        )
        found = {row["error"]: row["count"] for row in self._all(sql, (split == "eval",))}
        dropped = sum(count for error, count in found.items() if error.startswith((DROPPED, UNUSED)))
        errors = {error: count for error, count in found.items() if not error.startswith((DROPPED, UNUSED))}
        return errors, self.count(Filter(split)) - dropped

    def truncated(self) -> tuple[int, int]:
        """In training: completions that a limit cut, of tokens, turns or time, and all that were generated."""
        sql = (
            "SELECT coalesce(sum(finish_reason = 'length'), 0), count(finish_reason) FROM rollouts "
            "WHERE step_id % 2 = 0"
        )
        cut, generated = self._all(sql)[0]
        return cut, generated

    def steps_with_advantage(self) -> set[int]:
        """Steps in which a rollout had an advantage other than 0."""
        sql = "SELECT DISTINCT step_id / 2 AS step FROM rollouts WHERE step_id % 2 = 0 AND advantage != 0"
        return {row["step"] for row in self._all(sql)}

    def groups(self, split: Split, step: int) -> list[dict[str, Any]]:
        """The groups of a step: number, task's id, rollouts, lowest, mean and highest reward."""
        sql = """
            SELECT r.group_index AS "group", t.id AS task_id, count(*) AS rollouts, min(r.reward) AS low,
                   avg(r.reward) AS reward, max(r.reward) AS high
            FROM (SELECT group_index, task_key, iif(typeof(reward) = 'real', reward, NULL) AS reward FROM rollouts
                  WHERE step_id = ?) AS r
            JOIN tasks AS t ON t.key = r.task_key GROUP BY r.group_index ORDER BY r.group_index
        """
        return [dict(row) for row in self._all(sql, (step_id_of(split, step),))]

    def group(self, split: Split, step: int, number: int) -> list[dict[str, Any]]:
        """Summaries of a group's rollouts, in order; [] for no such group."""
        sql = "SELECT key FROM rollouts WHERE step_id = ? AND group_index = ? ORDER BY key"
        return self.summaries([key for (key,) in self._tuples(sql, (step_id_of(split, step), number))])

    def attempts(self, split: Split, step: int) -> list[tuple[str, int, Any, int, int, str | None]]:
        """Every rollout of a step, in order: task's id, attempt, reward, tokens, key, error."""
        sql = """
            SELECT t.id, r.attempt, r.reward, r.tokens, r.key, r.error FROM rollouts AS r
            JOIN tasks AS t ON t.key = r.task_key WHERE r.step_id = ? ORDER BY r.key
        """
        return self._tuples(sql, (step_id_of(split, step),))

    # --- tasks and events -------------------------------------------------------------------------------------------

    def tasks(self, limit: int = 50, after: str = "") -> list[dict[str, Any]]:
        """Tasks by id, those behind `after`: id, prompt, columns, number of rollouts, of failed ones, mean reward.

        A task whose content changed during the run appears once for each.
        """
        sql = """
            SELECT t.id, content, count(r.key) AS rollouts, coalesce(sum(r.status = 'failed'), 0) AS failed,
                   avg(r.reward) AS reward
            FROM (SELECT * FROM tasks WHERE id > ? ORDER BY id, key LIMIT ?) AS t
            LEFT JOIN rollouts AS r ON r.task_key = t.key GROUP BY t.key ORDER BY t.id, t.key
        """
        rows = self._all(sql, (after, limit))
        return [
            {**read_task(row["id"], row["content"]), **{n: row[n] for n in ("rollouts", "failed", "reward")}}
            for row in rows
        ]

    def tasks_called(self, task_id: str) -> list[dict[str, Any]]:
        """The contents that a task had in this run, oldest first: id, prompt, columns; [] for no such task."""
        rows = self._all("SELECT id, content FROM tasks WHERE id = ? ORDER BY key", (text(task_id),))
        return [read_task(row["id"], row["content"]) for row in rows]

    def tasks_of(self, split: Split, steps: list[int]) -> list[dict[str, Any]]:
        """The tasks that were attempted in these steps: id, prompt, columns."""
        ids = ", ".join(str(step_id_of(split, int(step))) for step in steps)
        sql = f"SELECT id, content FROM tasks WHERE key IN (SELECT task_key FROM rollouts WHERE step_id IN ({ids}))"
        return [read_task(row["id"], row["content"]) for row in self._all(sql)]

    def events(self, kind: str | None = None, after: int = 0, limit: int = -1) -> list[dict[str, Any]]:
        """Events in order: id, time, kind, message, step if any, and their details. after: an event's id."""
        sql = "SELECT * FROM events WHERE id > ? AND (? IS NULL OR kind = ?) ORDER BY id LIMIT ?"
        rows = self._all(sql, (after, kind, kind, limit))
        return [
            {
                **{name: row[name] for name in ("id", "time", "kind", "message")},
                **({} if row["step"] is None else {"step": row["step"]}),
                **json.loads(row["details"]),
            }
            for row in rows
        ]

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _metrics_of(self, step_ids: list[int]) -> list[tuple[str, int, Any]]:
        if not step_ids:
            return []
        sql = (
            "SELECT name, step_id, value FROM metrics INDEXED BY metrics_by_step "
            "WHERE step_id BETWEEN ? AND ? AND step_id % 2 = ? ORDER BY step_id, name"
        )
        return self._tuples(sql, (step_ids[0], step_ids[-1], step_ids[0] % 2))

    def _in_full(self, keys: list[int]) -> list[dict[str, Any]]:
        sql = """
            SELECT r.*, t.id AS task_id, t.content AS task_content, c.texts, c.samples FROM rollouts AS r
            JOIN tasks AS t ON t.key = r.task_key JOIN contents AS c ON c.key = r.key WHERE r.key IN ({})
        """
        return [read_rollout(dict(row)) for row in self._by_key(sql, keys)]

    def _by_key(self, sql: str, keys: list[int]) -> list[sqlite3.Row]:
        found = {row["key"]: row for row in self._all(sql.format(", ".join(map(str, map(int, keys)))))}
        return [found[key] for key in keys if key in found]

    def _one(self, sql: str, values: tuple[Any, ...] = ()) -> Any:
        return self._all(sql, values)[0][0]

    def _all(self, sql: str, values: tuple[Any, ...] = ()) -> list[sqlite3.Row]:
        with self._explained():
            return self._connection.execute(sql, values).fetchall()

    def _tuples(self, sql: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        """As `_all`, for very many rows: plain tuples are several times faster to go through."""
        with self._explained():
            cursor = self._connection.cursor()
            cursor.row_factory = None
            return cursor.execute(sql, values).fetchall()

    @contextmanager
    def _snapshot(self) -> Iterator[None]:
        """Reads inside see one state, whatever is written meanwhile."""
        with self._explained():
            self._connection.execute("BEGIN")
            try:
                yield
            finally:
                self._connection.execute("COMMIT")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            with self._one_at_a_time:
                yield
        except sqlite3.Error as error:
            raise StoreError(f"{self.folder / DATABASE} cannot be read ({error})") from error


def read_rows(run: Path, name: str) -> Iterator[dict[str, Any]]:
    """Rows of a run: `metrics`, `rollouts`, `eval_metrics`, `eval_rollouts` or `events`; nothing when it has no store.

    Raises StoreError for a store of another version.
    """
    if version_of(run) is None:
        return
    split: Split = "eval" if name.startswith("eval_") else "train"
    with RunReader(run) as reader:
        match name.removeprefix("eval_"):
            case "metrics":
                yield from reader.metric_rows(split)
            case "rollouts":
                yield from reader.rollouts(Filter(split=split))
            case "events":
                yield from reader.events()
            case _:
                raise ValueError(f"a run has no rows called {name!r}")
