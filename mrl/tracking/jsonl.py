"""`jsonl`: everything that is reported, as rows of `tracking.jsonl` in the run's folder."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any, TextIO

from mrl.tracking.base import RunInfo
from mrl.types import Outcome

FILE = "tracking.jsonl"


class JsonlTracker:
    """One row per call. A resumed run keeps the rows up to its checkpoint and rewrites the later ones."""

    run_id: str | None = None  # the file is found by the run's folder
    file: TextIO

    def start(self, run: RunInfo) -> None:
        path = run.folder / FILE
        if path.exists():
            _truncate(path, run.step)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("a", encoding="utf-8")
        self.step = run.step
        self._write(kind="resume" if run.step else "start", run=run.name, config=run.config, facts=run.facts)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.step = step
        self._write(kind="metrics", **metrics)

    def note(self, message: str) -> None:
        self._write(kind="note", message=message)

    def finish(self, status: Outcome = "finished") -> None:
        self._write(kind="finish", status=status)
        self.file.close()

    def _write(self, kind: str, **values: Any) -> None:
        row = {"step": self.step, "time": time.time(), "kind": kind, **values}
        self.file.write(json.dumps(_finite(row), ensure_ascii=False, allow_nan=False, default=str) + "\n")
        self.file.flush()


def _truncate(path: Path, step: int) -> None:
    """Keep the rows up to `step`; what a killed process wrote by half goes too."""
    kept = path.with_name(path.name + ".partial")
    with path.open(encoding="utf-8", errors="replace") as rows, kept.open("w", encoding="utf-8") as file:
        file.writelines(row for row in rows if _belongs(row, step))
    os.replace(kept, path)


def _belongs(row: str, step: int) -> bool:
    try:
        return int(json.loads(row)["step"]) <= step
    except (ValueError, TypeError, KeyError):
        return False


def _finite(value: Any) -> Any:
    """JSON has no NaN or infinity: they become their names, so that they are seen."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return value
