"""A step beside TRL's."""

from __future__ import annotations

import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from vs_trl import SIDES, train_trl

from gpu_checks.machine import version
from gpu_checks.models import speed_model
from gpu_checks.report import Report, Skip
from gpu_checks.runs import run


def trl(report: Report) -> None:
    """A step beside TRL's `GRPOTrainer`, both generating with transformers: the same model, prompts, lengths, loss."""
    if not version("trl"):
        raise Skip("needs `pip install trl`")
    path, steps = speed_model(report), 8 if report.gpu else 1
    rates: dict[str, list[float]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(2 if report.gpu else 1):
            for side in rates:
                rates[side].append(step_seconds(report, side, path, Path(folder) / f"{turn}", steps))
    middle = {side: statistics.median(found) for side, found in rates.items()}
    report.facts |= {f"{side}: step, s": round(seconds, 3) for side, seconds in middle.items()}
    best = min(seconds for side, seconds in middle.items() if side != "mrl")
    report.facts["TRL's best / mrl"] = round(best / middle["mrl"], 2)


def step_seconds(report: Report, side: str, path: str, folder: Path, steps: int) -> float:
    """Median time between two calls of the reward function, which both sides call once a step."""
    calls: list[float] = []

    def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        calls.append(time.perf_counter())
        return [sum(ids) % 97 / 97 for ids in completion_ids]

    prompts = [" ".join(f"w{100 + (37 * row + 11 * at) % 300}" for at in range(32)) for row in range(64)]
    common = {"num_generations": 8, "max_completion_length": 256 if report.gpu else 16, "max_steps": steps + 2}
    where = f"{folder}-{side}".replace(" ", "").replace(",", "-")
    if side == "mrl":
        options = {"model": path, "reward_funcs": reward, "weight_sync_method": "direct", "loss_type": "dapo"}
        rows = [{"prompt": prompt} for prompt in prompts]
        same = {"batch_size": 8, "temperature": 1.0, "learning_rate": 1e-6}
        run(report, Path(where), train_dataset=rows, **options, **common, **same)
    else:
        own = {"per_device_train_batch_size": 64, "bf16": report.gpu, "use_cpu": not report.gpu}
        train_trl(path, where, reward, prompts, **common, **own, **SIDES[side])
    return statistics.median(later - earlier for earlier, later in pairwise(calls[1:]))
