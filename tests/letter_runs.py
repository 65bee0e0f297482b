"""Runs whose reward can be learned in a few dozen steps: how much of a completion is the letter a."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mrl.loop.recorded_run import RunResult
from mrl.store.run import read_rows
from tests import small_runs

TASKS = [{"prompt": f"say {i}", "want": "a"} for i in range(10)]


def share_of_a(completions: list[str], want: list[str], **_: Any) -> list[float]:
    return [text.count(letter) / max(len(text), 1) for text, letter in zip(completions, want, strict=True)]


def run(model: str, folder: Path, **changes: Any) -> RunResult:
    defaults = {
        "train_dataset": TASKS,
        "reward_funcs": share_of_a,
        "max_steps": 3,
        "batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 8,
        "learning_rate": 1e-2,
        "weight_sync_method": "direct",
        "save_steps": 0,
    }
    return small_runs.run(model, folder, **(defaults | changes))


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    return list(read_rows(folder, "metrics"))
