"""Answers by the content of their requests, and what was spent on them: a SQLite file, or memory."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mrl.errors import RewardError

FILE = "judge_cache.db"
"""In a run's folder."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, text TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS spent (judge TEXT PRIMARY KEY, prompt_tokens INTEGER, completion_tokens INTEGER);
"""


class AnswerCache:
    """Several workers may share a file. Only answers that could be read are kept; what the others took is counted."""

    def __init__(self, path: Path | None) -> None:
        """path: None = in memory. Raises RewardError for a file that cannot be used, as all methods do."""
        self.path = path
        with self._usable():
            self._database = sqlite3.connect(
                ":memory:" if path is None else path, timeout=30, isolation_level=None, check_same_thread=False
            )
            # What a power cut takes is asked again; waiting for the disk at each answer would cost more.
            self._database.execute("PRAGMA synchronous=OFF")
            self._database.executescript(_SCHEMA)

    def get(self, key: str) -> str | None:
        """The answer to the request with this key."""
        row = self._row("SELECT text FROM answers WHERE key = ?", key)
        return None if row is None else str(row[0])

    def put(self, key: str, text: str) -> None:
        """Keep an answer."""
        self._row("INSERT OR REPLACE INTO answers VALUES (?, ?)", key, text)

    def add_spent(self, judge: str, prompt_tokens: int, completion_tokens: int) -> None:
        """Count the tokens of an answer, whatever became of it."""
        self._row(
            "INSERT INTO spent VALUES (?, ?, ?) ON CONFLICT (judge) DO UPDATE SET prompt_tokens = prompt_tokens + "
            "excluded.prompt_tokens, completion_tokens = completion_tokens + excluded.completion_tokens",
            judge,
            prompt_tokens,
            completion_tokens,
        )

    def spent(self, judge: str) -> tuple[int, int]:
        """Tokens of prompts and of completions that a judge has taken, in this run or wherever the file was used."""
        row = self._row("SELECT * FROM spent WHERE judge = ?", judge)
        return (0, 0) if row is None else (row[1], row[2])

    def close(self) -> None:
        """Let go of the file."""
        self._database.close()

    def _row(self, statement: str, *values: Any) -> Any:
        with self._usable():
            return self._database.execute(statement, values).fetchone()

    @contextlib.contextmanager
    def _usable(self) -> Iterator[None]:
        """Raises RewardError for what is wrong with the file. It ends the run, at the start and later (a full disk):
        without it what is paid for would be neither kept nor counted."""
        try:
            yield
        except sqlite3.Error as error:
            raise RewardError(
                f"judge: cache: {self.path} cannot be used ({error}); name another file, move it away, or free space"
            ) from None
