"""`tracking.jsonl` holds every call, whole, and a resumed run's rows once."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from mrl.tracking import RunInfo
from mrl.tracking.jsonl import JsonlTracker


def write(folder: Path, steps: list[int], step: int = 0, version: float = 1.0) -> None:
    tracker = JsonlTracker()
    tracker.start(RunInfo("run", folder, 10, {"training": {"seed": 1}}, step=step))
    for number in steps:
        tracker.log(number, {"reward/mean": number + version})
        if number % 2 == 0:
            tracker.log(number, {"eval/mean": version})
            tracker.note(f"after {number}")
    tracker.finish("interrupted")


def rows(folder: Path, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "tracking.jsonl").read_text().splitlines()]
    return [row for row in found if row["kind"] == kind]


def test_rows_hold_configuration_metrics_notes_and_the_end(tmp_path: Path) -> None:
    write(tmp_path, [1, 2])
    assert rows(tmp_path, "start")[0]["config"] == {"training": {"seed": 1}}
    assert [row["reward/mean"] for row in rows(tmp_path, "metrics") if "reward/mean" in row] == [2.0, 3.0]
    assert rows(tmp_path, "note")[0] | {"time": 0} == {"step": 2, "time": 0, "kind": "note", "message": "after 2"}
    assert rows(tmp_path, "finish")[0]["status"] == "interrupted"


def test_a_resumed_run_replaces_the_rows_past_its_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, [1, 2, 3, 4, 5])
    with (tmp_path / "tracking.jsonl").open("a") as file:
        file.write('{"step": 6, "ti')  # the process was killed here
    write(tmp_path, [4, 5, 6], step=3, version=100.0)
    metrics = rows(tmp_path, "metrics")
    assert [(row["step"], row["reward/mean"]) for row in metrics if "reward/mean" in row] == [
        (1, 2.0),
        (2, 3.0),
        (3, 4.0),
        (4, 104.0),
        (5, 105.0),
        (6, 106.0),
    ]
    assert [row["step"] for row in rows(tmp_path, "note")] == [2, 4, 6]
    assert [row["step"] for row in rows(tmp_path, "resume")] == [3]


def test_what_is_not_finite_is_written_by_name(tmp_path: Path) -> None:
    tracker = JsonlTracker()
    tracker.start(RunInfo("run", tmp_path, 1, {}))
    tracker.log(1, {"train/loss": math.nan, "train/grad_norm": math.inf, "train/kl": -math.inf})
    tracker.finish()
    row = rows(tmp_path, "metrics")[0]
    assert (row["train/loss"], row["train/grad_norm"], row["train/kl"]) == ("nan", "inf", "-inf")
