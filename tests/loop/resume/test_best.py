"""Which checkpoints are kept, and which one is the best."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from mrl.errors import CheckpointError, ConfigError
from mrl.loop.checkpointing import best_so_far
from mrl.models import resolve_model
from mrl.store.checkpoints import Checkpoint, best_step, list_checkpoints
from mrl.store.run import read_rows
from tests.small_runs import TASKS, run


def test_limits_and_best(tiny_model: str, tmp_path: Path) -> None:
    run(tiny_model, tmp_path / "r", max_steps=6, save_total_limit=2, best_metric="reward/mean")
    rewards = {row["step"]: row["reward/mean"] for row in read_rows(tmp_path / "r", "metrics")}
    best = max(rewards, key=lambda step: rewards[step])
    assert {c.step for c in list_checkpoints(tmp_path / "r")} == {5, 6, best}
    assert resolve_model(f"{tmp_path / 'r'}@best").endswith(f"step-{best}")
    assert resolve_model(f"{tmp_path / 'r'}@5").endswith("step-5")
    assert resolve_model(str(tmp_path / "r")).endswith("step-6")
    with pytest.raises(CheckpointError, match="no checkpoint '77'"):
        resolve_model(f"{tmp_path / 'r'}@77")


def test_best_of_a_metric_there_is_not(tiny_model: str, tmp_path: Path) -> None:
    """What a reward function was to log, and did not, is found at the first checkpoint; all else before the run."""

    def might_log(completions: list[str], log_metric: Any) -> list[float]:
        return [len(set(text)) / 8 for text in completions]

    with pytest.raises(ConfigError, match="no step has a metric 'reward/maen'; the nearest: reward/mean"):
        run(tiny_model, tmp_path / "r", best_metric="reward/maen")
    assert not (tmp_path / "r").exists()
    with pytest.raises(ConfigError, match="there is no metric 'reward/maen' at step 1"):
        run(tiny_model, tmp_path / "r", best_metric="reward/maen", reward_funcs=might_log)


@pytest.mark.slow
def test_best_by_an_evaluation_counts_where_there_was_one(tiny_model: str, tmp_path: Path) -> None:
    """The reward falls from call to call: an older score would be credited to steps 3 and 5, and 2 has the best."""
    calls: list[int] = []

    def falling(completions: list[str], **_: Any) -> list[float]:
        calls.append(1)
        return [1 / len(calls) + index / 1000 for index, _ in enumerate(completions)]

    held_out = {"eval_dataset": TASKS[:2], "eval_steps": 2, "best_metric": "eval/mean", "reward_funcs": falling}
    run(tiny_model, tmp_path / "r", **held_out, max_steps=6)
    for step in (4, 5, 6):
        shutil.rmtree(tmp_path / "r" / "checkpoints" / f"step-{step}")
    states = [checkpoint.state["best"] for checkpoint in list_checkpoints(tmp_path / "r")]
    assert [None if best is None else best["step"] for best in states] == [None, 2, 2]
    run(tiny_model, tmp_path / "r", **held_out, max_steps=6, resume="auto")  # its first checkpoint has no evaluation
    assert best_step(tmp_path / "r") == 2
    scores = {row["step"]: row["eval/mean"] for row in read_rows(tmp_path / "r", "eval_metrics")}
    assert Checkpoint(tmp_path / "r" / "checkpoints" / "step-6", 6).state["best"]["value"] == scores[2]


def test_what_is_a_candidate_for_the_best_checkpoint() -> None:
    def best(metrics: dict[str, float], before: dict[str, Any] | None = None, wanted: str = "eval/mean") -> Any:
        found = best_so_far(before, wanted, 9, metrics)
        return found and (found["step"], found["value"])

    before = {"metric": "eval/mean", "value": 0.5, "step": 2}
    assert best({"eval/mean": 0.6}, before) == (9, 0.6)
    assert best({"eval/mean": 0.5}, before) == (2, 0.5)
    assert best({"eval/mean": float("nan")}, before) == (2, 0.5)
    assert best({"reward/mean": 0.5}) is None, "no evaluation was due"
    assert best({"train/tokens": 0.0}, wanted="-train/loss") is None, "the step taught nothing"
    assert best({"train/loss": 0.4}, before, wanted="-train/loss") == (9, 0.4), "another metric begins anew"
    assert best({"eval/mean": 0.6}, before | {"smaller": False}, wanted="-eval/mean") == (9, 0.6)
    for wanted, metrics in {"eval/mena": {"eval/mean": 1.0}, "loss": {}, "train/los": {"train/tokens": 2.0}}.items():
        with pytest.raises(ConfigError, match="best_metric: there is no metric"):
            best(metrics, wanted=wanted)
