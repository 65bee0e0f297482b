"""Runs with sources that another package registers: three turns with rewards of their own; all prompts at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mrl.errors import ConfigError
from mrl.loop.replay import replay
from mrl.store.run import read_rows
from tests import small_runs
from tests.rollouts.sources import TURNS
from tests.small_runs import distinct
from tests.soak import but

GAME: dict[str, Any] = {
    "rollout_source": "echo_game",
    "reward_funcs": None,
    "max_tokens": 4,
    "max_completion_length": 32,
}


def rollouts(folder: Path) -> list[dict[str, Any]]:
    return list(read_rows(folder, "rollouts"))


def test_three_turns_are_trained_on_as_they_were_sampled(tiny_model: str, tmp_path: Path) -> None:
    result = small_runs.run(
        tiny_model, tmp_path / "r", **GAME, eval_dataset=small_runs.TASKS, eval_steps=2, weight_sync_method="reload"
    )
    assert result.status == "finished"
    rows = rollouts(tmp_path / "r")
    assert len(rows) == 4 * 2 * 3
    for row in rows:
        (sample,) = row["samples"]
        assert sample["mask"].count(0) == 2 * (TURNS - 1)
        assert len(row["step_rewards"]) == TURNS
        assert row["reward"] == pytest.approx(sum(row["step_rewards"]))
    metrics = list(read_rows(tmp_path / "r", "metrics"))
    # Token for token as sampled: trainer and sampler agree on every one of the policy's tokens, and on no other.
    assert all(row["train/logprob_gap_max"] < 1e-4 for row in metrics)
    assert all(row["train/tokens"] <= sum(sum(r["samples"][0]["mask"]) for r in rows if r["step"] == row["step"])
               for row in metrics)  # fmt: skip
    assert len(list(read_rows(tmp_path / "r", "eval_metrics"))) == 3
    assert replay(tmp_path / "r", 2).verdict == "equal"


def test_a_rollout_that_arrives_scored_stays_so(tiny_model: str, tmp_path: Path) -> None:
    """Also with reward functions; those that failed are not handed to them either."""
    asked: list[str] = []

    def count(completions: list[str], **_: Any) -> list[float]:
        asked.extend(completions)
        return [0.0] * len(completions)

    options = GAME | {"reward_funcs": count, "rollout_options": {"fails_every": 5}, "reward_trial": False}
    small_runs.run(tiny_model, tmp_path / "r", **options)
    rows = rollouts(tmp_path / "r")
    failed = [row for row in rows if row["status"] == "failed"]
    assert asked == []
    assert len(failed) == 24 // 5
    assert {row["error"] for row in failed} == {"ConnectionError: the environment broke off"}
    assert all(row["reward"] is not None for row in rows if row["status"] == "ok")


@pytest.mark.slow
@pytest.mark.parametrize("mode", but([{"async_mode": "pipeline"}], [{}, {"async_mode": "pipeline"}]))
def test_a_resumed_run_of_three_turns_attempts_the_same(mode: dict[str, Any], tiny_model: str, tmp_path: Path) -> None:
    """Later turns join what is decoded as they come, so the last bits are left to time; everything else is not."""
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    small_runs.run(tiny_model, whole, **GAME, **mode)
    small_runs.run(tiny_model, halves, **GAME, **mode, max_steps=2)
    small_runs.run(tiny_model, halves, **GAME, **mode, resume="auto", allow_change=["max_steps"])
    attempted = [
        [(row["step"], row["group"], row["id"], row["samples"][0]["prompt_ids"]) for row in rollouts(folder)]
        for folder in (whole, halves)
    ]
    assert attempted[0] == attempted[1]
    assert {row["step"] for row in rollouts(halves)} == {1, 2, 3, 4}


def test_three_turns_in_a_queue(tiny_model: str, tmp_path: Path) -> None:
    options = GAME | {"rollout_options": {"think": 0.004}, "async_mode": "queue", "over_sampling": 1.5}
    result = small_runs.run(tiny_model, tmp_path / "r", **options)
    assert result.status == "finished"
    assert max(row["rollout/staleness_max"] for row in read_rows(tmp_path / "r", "metrics")) <= 1


def test_an_attempt_that_takes_too_long_is_left_out(tiny_model: str, tmp_path: Path) -> None:
    slow = GAME | {"rollout_options": {"think": 0.25}, "rollout_timeout": 0.9, "max_failed_fraction": 1.0}
    small_runs.run(tiny_model, tmp_path / "r", **slow, max_steps=1)
    failed = [row["error"] for row in rollouts(tmp_path / "r") if row["status"] == "failed"]
    assert failed
    assert set(failed) == {"took longer than 0.9 s (rollout_timeout)"}


def test_all_prompts_at_once_and_scored_like_any_other(tiny_model: str, tmp_path: Path) -> None:
    """The same seeds for the same attempts: it samples what `single_turn` does, one after the other."""
    options = {"max_steps": 1, "reward_funcs": distinct}
    for name, source in (("single", "single_turn"), ("all", "all_at_once")):
        small_runs.run(tiny_model, tmp_path / name, rollout_source=source, **options)
    ids = [[row["samples"][0]["completion_ids"] for row in rollouts(tmp_path / name)] for name in ("single", "all")]
    assert ids[0] == ids[1]
    assert [row["reward"] for row in rollouts(tmp_path / "all")] == [
        row["reward"] for row in rollouts(tmp_path / "single")
    ]


def test_sources_and_their_options_are_checked_first(tiny_model: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'single_turm' is not available; did you mean 'single_turn'"):
        small_runs.run(tiny_model, tmp_path / "r", rollout_source="single_turm")
    with pytest.raises(ConfigError, match="rollout_source echo_game has no option 'thinks'; it has think, fails_every"):
        small_runs.run(tiny_model, tmp_path / "r", **GAME | {"rollout_options": {"thinks": 1}})
    with pytest.raises(ConfigError, match=r"rollout_timeout.*makes all rollouts of a step in one call"):
        small_runs.run(tiny_model, tmp_path / "r", rollout_source="all_at_once", rollout_timeout=5.0)
    assert not (tmp_path / "r").exists()
