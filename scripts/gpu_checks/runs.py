"""Whole runs: stopping and going on, and each way of sending weights."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from gpu_checks.report import Report
from mrl import MRLTrainer


def checkpoints(report: Report) -> None:
    """A run that stops and goes on, against one that does not."""
    steps = 4 if report.gpu else 2
    with tempfile.TemporaryDirectory() as folder:
        whole = run(report, Path(folder) / "whole", max_steps=steps)
        cut = Path(folder) / "cut"
        run(report, cut, max_steps=steps // 2)
        again = run(report, cut, max_steps=steps, resume=str(cut))
        difference = weights_apart(whole.checkpoint, again.checkpoint)
        report.facts["bit for bit"] = difference == 0
        what = f"largest difference of a weight, learning rate 1e-4, {steps} updates"
        report.at_most(what, difference, steps * 1e-4)


def sync_methods(report: Report) -> None:
    """Each way of sending weights, over two steps: sampler and trainer agree after it."""
    with tempfile.TemporaryDirectory() as folder:
        for method in ("reload", "direct", "volume", "delta", "checkpoint"):
            result = run(report, Path(folder) / method, max_steps=2, weight_sync_method=method, dtype="float32")
            gap = result.metrics["train/logprob_gap"]
            report.at_most(f"{method}: mean gap between sampler and trainer, nats", gap, 1e-3)
            report.facts[f"{method}: sync, s"] = round(result.metrics["time/sync"], 3)


def run(report: Report, folder: Path, **options: Any) -> Any:
    """A short run of mrl; the shipped policy unless `model` says otherwise."""
    defaults: dict[str, Any] = {
        "model": "starter",
        "device": "auto" if report.gpu else "cpu",
        "train_dataset": [{"prompt": f"say {number}"} for number in range(16)],
        "reward_funcs": distinct_words,
        "report_to": [],
        "batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 32 if report.gpu else 16,
        "learning_rate": 1e-4,
        "save_steps": 0,
        "reward_trial": False,
    }
    if "resume" in options:
        given = {name: defaults[name] for name in ("train_dataset", "reward_funcs")}
        return MRLTrainer(**given, **options).train()
    return MRLTrainer(**defaults | {"run_dir": str(folder)} | options).train()


def distinct_words(completions: list[str], **_: Any) -> list[float]:
    """A reward that differs within a group."""
    return [len(set(text)) / 16 for text in completions]


def weights_apart(one: Path, other: Path) -> float:
    """The largest difference between two checkpoints' weights."""
    mine, theirs = (load_file(folder / "model.safetensors") for folder in (one, other))
    return max((mine[name] - theirs[name]).abs().max().item() for name in mine)
