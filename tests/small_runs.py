"""Runs of a few steps on a tiny model, and what of them does not depend on the clock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mrl import MRLTrainer
from mrl.loop.recorded_run import RunResult
from mrl.models import resolve_model
from mrl.store.run import read_rows

TASKS = [{"prompt": f"say {i}"} for i in range(6)]


def distinct(completions: list[str], **_: Any) -> list[float]:
    """A reward that differs within almost every group of random completions."""
    return [len(set(text)) / 8 for text in completions]


def options(model: str, folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "model": model,
        "device": "cpu",
        "train_dataset": TASKS,
        "reward_funcs": distinct,
        "run_dir": str(folder),
        "report_to": [],
        "batch_size": 2,
        "num_generations": 3,
        "max_completion_length": 6,
        "temperature": 1.0,
        "top_p": 1.0,
        "learning_rate": 1e-3,
        "num_rollout_workers": 1,
        "save_steps": 1,
        "max_steps": 4,
        **changes,
    }


def run(model: str, folder: Path, **changes: Any) -> RunResult:
    return MRLTrainer(**options(model, folder, **changes)).train()


def record_of(folder: Path, without: str = "time/") -> dict[str, Any]:
    """Everything a run did that depends neither on the clock nor on what had to be computed again; and no metrics whose
    names begin with `without`."""
    clock = ("time", "rollout/tokens_per_second")

    def timeless(row: dict[str, Any]) -> dict[str, Any]:
        left_out = ("time/", "cost/", "rollout/prefill_", without)
        return {key: repr(value) for key, value in row.items() if key not in clock and not key.startswith(left_out)}

    def rollout(row: dict[str, Any]) -> list[Any]:
        kept = ("step", "group", "id", "samples", "reward", "rewards", "advantage", "messages", "status", "metrics")
        return [row[key] for key in kept]

    return {
        "metrics": [timeless(row) for row in read_rows(folder, "metrics")],
        "rollouts": [rollout(row) for row in read_rows(folder, "rollouts")],
        "eval_metrics": [timeless(row) for row in read_rows(folder, "eval_metrics")],
        "eval_rollouts": [rollout(row) for row in read_rows(folder, "eval_rollouts")],
    }


def check_same_to_rounding(left: Path, right: Path) -> None:
    """Same tokens, same rewards; figures to rounding. For runs whose requests come one by one, over a network: which of
    them are computed together depends on the clock, and with it last digits."""

    def sampled(run: Path) -> list[Any]:
        rows = sorted(read_rows(run, "rollouts"), key=lambda row: (row["step"], row["id"]))
        return [(r["step"], r["id"], r["reward"], [one["completion_ids"] for one in r["samples"]]) for r in rows]

    assert sampled(left) == sampled(right)
    mine, theirs = (list(read_rows(run, "metrics")) for run in (left, right))
    for metric in ("train/loss", "train/grad_norm", "train/entropy", "reward/mean"):
        assert [row[metric] for row in mine] == pytest.approx([row[metric] for row in theirs], abs=1e-4), metric


def steps_of(folder: Path) -> list[int]:
    return [row["step"] for row in read_rows(folder, "metrics")]


def same_weights(left: Path, right: Path) -> bool:
    """Of the newest checkpoints of two runs."""
    mine, theirs = load_file(tensors_of(left)), load_file(tensors_of(right))
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def tensors_of(folder: Path) -> Path:
    newest = Path(resolve_model(str(folder)))
    return next(iter(sorted(newest.glob("*model.safetensors"))))
