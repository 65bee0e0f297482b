"""Trouble is found before a run, shown while it runs, or ends it with a message; nothing that was done is lost."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mrl.cli.runs import runs
from mrl.errors import ConfigError, DataError, RewardError, TrainingError
from mrl.store.run import read_rows
from tests.letter_runs import metrics_of, run
from tests.small_runs import distinct

TALKS = [{"id": "t0", "prompt": [{"role": "user", "content": "say a"}], "want": "a"}]


def says_a(completions: list[Any], **_: Any) -> list[float]:
    return [float("a" in completion[-1]["content"]) for completion in completions]


def test_a_rollout_that_cannot_be_scored_is_left_out_kept_and_told(
    tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def sometimes(completions: list[str], **_: Any) -> list[float]:
        return [float("nan") if i % 4 == 1 else 1.0 for i in range(len(completions))]

    result = run(tiny_model, tmp_path / "r", reward_funcs=sometimes, max_steps=1, report_to=["console"])
    cause = "could not be scored{}: sometimes gave nan, not a finite number"
    assert result.warnings[0] == f"4 of 16 rollouts {cause.format('')}"
    said = capsys.readouterr().err
    assert f"warning: step 1: 4 of 16 rollouts {cause.format(' and are left out')}" in said
    assert f"warning: finished, but 4 of 16 rollouts {cause.format('')}" in said
    assert "step 1/1  reward 1.000  pass 100%  failed 25%" in said
    rows = list(read_rows(tmp_path / "r", "rollouts"))
    failed = [row for row in rows if row["status"] == "failed"]
    assert len(failed) == 4
    assert all(row["reward"] is None and row["advantage"] is None and "sometimes" in row["error"] for row in failed)
    assert metrics_of(tmp_path / "r")[0]["rollout/failed_fraction"] == 0.25
    assert metrics_of(tmp_path / "r")[0]["reward/mean"] == 1.0


def test_too_many_failures_stop_the_run_with_the_causes_counted(tiny_model: str, tmp_path: Path) -> None:
    def broken(completions: list[str], **_: Any) -> list[float]:
        raise KeyError("gold")

    with pytest.raises(TrainingError, match=r"16 of 16 rollouts.*\n.*16 x .*broken.*KeyError"):
        run(tiny_model, tmp_path / "r", reward_funcs=broken)
    assert len(list(read_rows(tmp_path / "r", "rollouts"))) == 16  # nothing is lost
    assert any(event["kind"] == "error" for event in read_rows(tmp_path / "r", "events"))


def test_rewards_that_fail_row_by_row_are_one_cause(tiny_model: str, tmp_path: Path) -> None:
    def text(completions: list[str], **_: Any) -> list[Any]:
        return [f"{i} points" for i in range(len(completions))]

    with pytest.raises(TrainingError) as raised:
        run(tiny_model, tmp_path / "r", reward_funcs=text)
    assert str(raised.value).splitlines()[1:] == ["  16 x text gave …, not a finite number"]


def zero(completions: list[str], **_: Any) -> list[float]:
    return [0.0] * len(completions)


def raising(completions: list[str], **_: Any) -> list[float]:
    raise ValueError(f"no answer in {completions[0]!r}")


@pytest.mark.parametrize(
    ("options", "shown", "warned", "summed"),
    [
        (
            {"reward_funcs": zero, "max_steps": 6},
            "reward 0.000  pass 0%  groups alike for 6 steps",
            "warning: step 5: every reward was 0 in the last 5 steps",
            "every reward was 0 in all 6 steps",
        ),
        (
            {"reward_funcs": raising, "max_failed_fraction": 1.0},
            "step 3/3  failed 100%",
            "warning: step 1: none of the 16 rollouts could be scored, so that nothing is learned: "
            "raising raised ValueError",
            "48 of 48 rollouts could not be scored: raising raised ValueError: no answer in …",
        ),
        (
            {"max_completion_length": 1, "log_completions": 1},
            "truncated 100%",
            "completions were cut after 1 tokens (max_tokens)",
            "completions were cut at the token limit",
        ),
    ],
)
def test_trouble_that_ends_no_run_is_shown_warned_of_and_summed_up(
    options: dict[str, Any],
    shown: str,
    warned: str,
    summed: str,
    tiny_model: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = run(tiny_model, tmp_path / "r", report_to=["console"], **options)
    said = capsys.readouterr().err
    assert shown in said.splitlines()[-1]
    assert warned in said
    assert any(summed in warning for warning in result.warnings)
    assert any(summed in line for line in said.splitlines() if line.startswith("warning: finished, but "))
    assert "no group" not in said
    events = [event["message"] for event in read_rows(tmp_path / "r", "events") if event["kind"] == "warning"]
    assert events[-1].startswith("finished, but ")
    assert len(events) < 8
    runs(["show", str(tmp_path / "r")])
    listed = capsys.readouterr().out.partition("\nwarnings\n")[2]
    assert all(message in listed for message in events)
    if "log_completions" in options:
        lines = said.splitlines()
        at = next(place for place, line in enumerate(lines) if re.match(r"step 3  \[\w+\] reward [\d.]+$", line))
        assert re.match(r"prompt: say \d$", lines[at + 1])
        assert lines[at + 2].startswith("completion  (cut at the token limit): ")


def test_a_reward_of_the_wrong_length_stops_the_run_and_keeps_the_rollouts(tiny_model: str, tmp_path: Path) -> None:
    def short(completions: list[str], **_: Any) -> list[float]:
        return [1.0]

    with pytest.raises(RewardError, match=r"short.*1.*16"):
        run(tiny_model, tmp_path / "r", reward_funcs=short)
    assert len(list(read_rows(tmp_path / "r", "rollouts"))) == 16


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"train_dataset": None}, ConfigError, "no dataset"),
        ({"train_dataset": [{"question": "x"}]}, DataError, "prompt"),
        ({"train_dataset": []}, DataError, "empty"),
        ({"train_dataset": [{"prompt": "x " * 600, "want": "a"}]}, DataError, "max_model_len"),
        ({"train_dataset": [{"prompt": "x"}]}, RewardError, "want"),
        ({"reward_funcs": "nowhere.py:f"}, RewardError, "nowhere.py"),
        ({"backend": "cloud"}, ConfigError, "backend"),
        ({"engine": "vlm"}, ConfigError, "engine"),
        ({"weight_sync_method": "post"}, ConfigError, "weight_sync_method"),
        ({"sandbox": "none"}, ConfigError, "sandbox"),
        ({"report_to": ["wandbb"]}, ConfigError, "report_to"),
        ({"temperature": 0.0}, ConfigError, "temperature"),
        ({"eval_steps": 1}, ConfigError, "eval_split or eval_dataset"),
        ({"best_metric": "eval/pass_rate"}, ConfigError, "best_metric='eval/pass_rate': .* set eval_split"),
        ({"best_metric": "-eval/mean"}, ConfigError, "best_metric='-eval/mean': .* set eval_split"),
        ({"train_dataset": TALKS, "reward_funcs": distinct}, RewardError, "distinct raised TypeError.*'t0'.* messages"),
        ({"reward_funcs": says_a}, RewardError, "says_a raised TypeError: .*test_trouble.py.* are text"),
        ({"reward_weights": [1.0, 2.0]}, RewardError, "reward_weights"),
    ],
)
def test_trouble_is_found_before_anything_is_loaded(
    options: dict[str, Any], error: type[Exception], message: str, tiny_model: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        run(tiny_model, tmp_path / "r", **options)
    assert not (tmp_path / "r").exists()


def test_a_second_run_never_writes_over_the_first(tiny_model: str, tmp_path: Path) -> None:
    run(tiny_model, tmp_path / "r", max_steps=1)
    with pytest.raises(ConfigError, match="already holds a run"):
        run(tiny_model, tmp_path / "r", max_steps=1)


def test_no_disk_space_is_found_before_training(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 0))  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"has 0 B free and 2 checkpoints need \d+\.\d kB; .*choose another run_dir"):
        run(tiny_model, tmp_path / "r")
