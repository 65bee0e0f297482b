"""Whole runs on a tiny model: the reward goes up, everything is recorded, trouble ends with a message."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from mrl import MRLTrainer
from mrl.errors import ConfigError, DataError, RewardError, TrainingError
from mrl.recorded_run import RunResult
from mrl.runs_cli import runs
from mrl.store.run import newest_checkpoint, read_rows

TASKS = [{"prompt": f"say {i}", "want": "a"} for i in range(10)]


def share_of_a(completions: list[str], want: list[str], **_: Any) -> list[float]:
    return [text.count(letter) / max(len(text), 1) for text, letter in zip(completions, want, strict=True)]


def distinct(completions: list[str], **_: Any) -> list[float]:
    """A reward that differs within every group of random completions."""
    return [len(set(text)) / 8 + 0.01 * len(text) for text in completions]


def says_a(completions: list[Any], **_: Any) -> list[float]:
    return [float("a" in completion[-1]["content"]) for completion in completions]


TALKS = [{"id": "t0", "prompt": [{"role": "user", "content": "say a"}], "want": "a"}]


def run(model: str, folder: Path, **options: Any) -> RunResult:
    defaults = {
        "model": model,
        "device": "cpu",
        "train_dataset": TASKS,
        "reward_funcs": share_of_a,
        "run_dir": str(folder),
        "report_to": [],
        "max_steps": 3,
        "batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 8,
        "temperature": 1.0,
        "top_p": 1.0,
        "learning_rate": 1e-2,
        "num_rollout_workers": 1,
        "weight_sync_method": "direct",
    }
    return MRLTrainer(**(defaults | options)).train()


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    return list(read_rows(folder, "metrics"))


@pytest.mark.parametrize("sync", ["direct", "reload"])
def test_the_reward_goes_up(tiny_model: str, tmp_path: Path, sync: str) -> None:
    result = run(tiny_model, tmp_path / "r", max_steps=25, num_generations=8, weight_sync_method=sync)
    rewards = [row["reward/mean"] for row in metrics_of(tmp_path / "r")]
    assert sum(rewards[:3]) / 3 < 0.05
    assert sum(rewards[-3:]) / 3 > 0.8
    assert result.status == "finished"
    assert max(row.get("train/logprob_gap_max", 0.0) for row in metrics_of(tmp_path / "r")) < 1e-4


def test_the_same_configuration_gives_the_same_run(tiny_model: str, tmp_path: Path) -> None:
    for name in ("a", "b"):
        run(tiny_model, tmp_path / name, seed=7, reward_funcs=distinct)
    run(tiny_model, tmp_path / "c", seed=8, reward_funcs=distinct)

    def tokens(name: str) -> list[Any]:
        return [row["samples"][0]["completion_ids"] for row in read_rows(tmp_path / name, "rollouts")]

    def losses(name: str) -> list[float]:
        return [row["train/loss"] for row in metrics_of(tmp_path / name)]

    assert tokens("a") == tokens("b")
    assert losses("a") == losses("b")
    assert tokens("a") != tokens("c")


def test_what_is_sampled_does_not_depend_on_how_many_workers_sample(tiny_model: str, tmp_path: Path) -> None:
    for workers in (1, 3):
        run(tiny_model, tmp_path / str(workers), num_rollout_workers=workers, weight_sync_method="reload", max_steps=2)
    first, second = (
        [r["samples"][0]["completion_ids"] for r in read_rows(tmp_path / n, "rollouts")] for n in ("1", "3")
    )
    assert first == second


def test_everything_is_recorded(tiny_model: str, tmp_path: Path) -> None:
    folder = tmp_path / "r"
    changes = {"train_dataset": TASKS + TALKS, "max_samples": 10, "eval_dataset": TASKS[:5], "eval_samples": 3}
    result = run(tiny_model, folder, eval_steps=2, save_steps=2, **changes)
    start = next(row for row in read_rows(folder, "events") if row["kind"] == "start")
    assert (start["tasks"], start["held_out"]) == ("10 of 11", "3 of 5")
    assert yaml.safe_load((folder / "config.yaml").read_text())["training"]["learning_rate"] == 1e-2
    assert json.loads((folder / "versions.json").read_text())["torch"]
    assert [row["step"] for row in metrics_of(folder)] == [1, 2, 3]
    rollouts = list(read_rows(folder, "rollouts"))
    assert len(rollouts) == (4 + 4 + 4) * 4  # the batch in which an epoch of 10 ends is filled from the next one
    for row in rollouts:
        sample = row["samples"][0]
        assert len(sample["completion_ids"]) == len(sample["logprobs"]) == len(sample["mask"]) > 0
        assert sample["policy_version"] == row["step"] - 1
        assert row["reward"] == row["rewards"]["share_of_a"]
        assert row["advantage"] is not None
        assert row["messages"][-1]["role"] == "assistant"
    assert [row["step"] for row in read_rows(folder, "eval_metrics")] == [0, 2, 3]
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["step-2", "step-3"]
    assert newest_checkpoint(folder) == result.checkpoint
    assert (folder / "reward.png").stat().st_size > 5000
    needed = {
        *(
            "reward/mean",
            "reward/std",
            "reward/zero_variance_groups",
            "reward/share_of_a/mean",
            "reward/share_of_a/std",
        ),
        *("rollout/completion_length_mean", "rollout/truncated_fraction", "rollout/tokens_per_second"),
        *("train/loss", "train/grad_norm", "train/entropy", "train/ratio", "train/clipped_low_fraction"),
        *("train/clipped_high_fraction", "train/logprob_gap", "train/logprob_gap_max", "train/learning_rate"),
        *("time/generate", "time/reward", "time/train", "time/sync", "time/step", "sync/policy_version"),
    }
    assert needed <= set(metrics_of(folder)[0])


def test_epochs_take_every_task_once(tiny_model: str, tmp_path: Path) -> None:
    result = run(tiny_model, tmp_path / "r", max_steps=-1, num_epochs=2)
    assert result.steps == 5  # 20 tasks, 4 in every step
    rows = list(read_rows(tmp_path / "r", "rollouts"))
    drawn = [row["prompt"] for row in rows if row["attempt"] == 0]
    per_epoch = [drawn[:10], drawn[10:]]
    prompts = sorted(task["prompt"] for task in TASKS)
    assert sorted(per_epoch[0]) == sorted(per_epoch[1]) == prompts
    assert per_epoch[0] != per_epoch[1]


def test_off_policy_between_syncs_is_seen_in_the_versions(tiny_model: str, tmp_path: Path) -> None:
    stale = {"sync_weights_every": 2, "weight_sync_method": "reload"}
    run(tiny_model, tmp_path / "r", max_steps=4, reward_funcs=distinct, **stale)
    versions = {row["step"]: row["samples"][0]["policy_version"] for row in read_rows(tmp_path / "r", "rollouts")}
    assert versions == {1: 0, 2: 0, 3: 1, 4: 1}
    gaps = {row["step"]: row["train/logprob_gap_max"] for row in metrics_of(tmp_path / "r")}
    assert gaps[1] < 1e-4
    assert gaps[2] > 1e-3


def test_top_p_is_corrected_for(tiny_model: str, tmp_path: Path) -> None:
    """The sampler's logprobs are those of the cut distribution, so the weight is the mass that was left."""
    run(tiny_model, tmp_path / "r", top_p=0.5, temperature=0.7, max_steps=1, reward_funcs=distinct)
    row = metrics_of(tmp_path / "r")[0]
    assert 0.4 < row["train/importance_weight"] < 0.7
    assert row["train/logprob_gap"] > 0.3


def test_longer_completions_are_kept_but_not_trained_on(tiny_model: str, tmp_path: Path) -> None:
    run(tiny_model, tmp_path / "r", max_completion_length=4, max_tokens=12, max_steps=1, beta=0.01)
    row = metrics_of(tmp_path / "r")[0]
    lengths = [len(r["samples"][0]["completion_ids"]) for r in read_rows(tmp_path / "r", "rollouts")]
    assert max(lengths) == 12
    assert row["rollout/overlong"] == sum(length > 4 for length in lengths)
    assert row.get("train/tokens", 0) == sum(length for length in lengths if length <= 4)
    assert any("max_completion_length" in event["message"] for event in read_rows(tmp_path / "r", "events"))


def test_truncated_completions_can_be_masked(tiny_model: str, tmp_path: Path) -> None:
    run(tiny_model, tmp_path / "r", mask_truncated_completions=True, max_steps=2, beta=0.01)
    for step in metrics_of(tmp_path / "r"):
        rows = [r for r in read_rows(tmp_path / "r", "rollouts") if r["step"] == step["step"]]
        ended = [r["samples"][0] for r in rows if r["samples"][0]["finish_reason"] == "stop"]
        assert step.get("train/tokens", 0) == sum(len(s["completion_ids"]) for s in ended)


def test_messages_and_async_rewards(tiny_model: str, tmp_path: Path) -> None:
    seen: list[Any] = []

    async def reward(
        prompts: list[Any], completions: list[Any], completion_ids: list[Any], trainer_state: Any, **_: Any
    ):
        await asyncio.sleep(0)
        seen.append((prompts[0], completions[0], trainer_state.global_step))
        return [float(len(ids)) for ids in completion_ids]

    tasks = [{"prompt": [{"role": "user", "content": f"hi {i}"}]} for i in range(4)]

    def letters(completions: list[Any], **_: Any) -> list[float]:
        return [float(len(completion)) for completion in completions]

    options = {"train_dataset": tasks, "reward_funcs": [reward, letters], "system_prompt": "be brief"}
    run(tiny_model, tmp_path / "r", max_steps=1, **options)
    notices = [row["message"] for row in read_rows(tmp_path / "r", "events") if row["kind"] == "notice"]
    assert len(notices) == 1, "the other one is right, and defaults need none"
    assert "letters gives 1 and 1 for completions as messages and 16 and" in notices[0]
    assert [step for _, _, step in seen[:-1]] == [0, 0], "tried with both kinds of completions"
    prompt, completion, step = seen[-1]
    assert prompt[0]["role"] == "user"
    assert completion[0]["role"] == "assistant"
    assert step == 1
    row = next(read_rows(tmp_path / "r", "rollouts"))
    assert [m["role"] for m in row["messages"]] == ["system", "user", "assistant"]


def test_two_rewards_are_averaged_and_logged_by_name(tiny_model: str, tmp_path: Path) -> None:
    def length(completions: list[str], **_: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    run(tiny_model, tmp_path / "r", reward_funcs=[share_of_a, length], max_steps=1)
    for row in read_rows(tmp_path / "r", "rollouts"):
        assert row["reward"] == pytest.approx((row["rewards"]["share_of_a"] + row["rewards"]["length"]) / 2)
    assert "reward/length/mean" in metrics_of(tmp_path / "r")[0]


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


def test_a_result_is_readable(tiny_model: str, tmp_path: Path) -> None:
    folder = tmp_path / "my run"
    result = run(tiny_model, folder, reward_funcs=distinct, eval_dataset=TASKS[:2], max_steps=2)
    lines = repr(result).splitlines()
    first, last = (metrics_of(folder)[step]["reward/mean"] for step in (0, -1))
    assert re.fullmatch(r"RunResult: finished after 2 steps, \d+ s", lines[0])
    assert lines[1].startswith(f"  reward {first:.3f} → {last:.3f}, held-out pass rate ")
    assert lines[-2:] == [f"  in {folder}", f"  next: mrl sample '{folder}' 'your prompt'"]
    assert len(lines) <= 6


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
        ({"reward_funcs": says_a}, RewardError, "says_a raised TypeError: .*test_trainer.py.* are text"),
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


def test_training_works_where_an_event_loop_is_running(tiny_model: str, tmp_path: Path) -> None:
    async def notebook() -> RunResult:
        return run(tiny_model, tmp_path / "r", max_steps=1)

    assert asyncio.run(notebook()).status == "finished"


def test_training_goes_on_from_a_run(tiny_model: str, tmp_path: Path) -> None:
    run(tiny_model, tmp_path / "first", max_steps=25, num_generations=8)
    run(str(tmp_path / "first"), tmp_path / "second", max_steps=1)
    reached, start = (
        metrics_of(tmp_path / "first")[-1]["reward/mean"],
        metrics_of(tmp_path / "second")[0]["reward/mean"],
    )
    assert start > 0.5 * reached > 0.3


SLOW_RUN = """
    import sys, time
    from mrl import MRLTrainer
    from mrl.workers.actor import ActorWorker

    if sys.argv[3] == "2":  # the second Ctrl-C comes while the first one's checkpoint is being written
        ActorWorker.save_checkpoint = lambda *_, **__: time.sleep(60)

    def slow(completions, **_):
        time.sleep(0.5)
        return [float(i) for i in range(len(completions))]

    result = MRLTrainer(
        model=sys.argv[1], train_dataset=[{"prompt": "x"}], reward_funcs=slow, run_dir=sys.argv[2], max_steps=1000,
        max_completion_length=4, device="cpu", num_rollout_workers=1, weight_sync_method="direct",
    ).train()
    print(result.status, result.steps, result.checkpoint)
"""


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_ends_after_the_step_and_twice_at_once(tiny_model: str, tmp_path: Path, times: int) -> None:
    script = tmp_path / "run.py"
    script.write_text(textwrap.dedent(SLOW_RUN))
    command = [sys.executable, str(script), tiny_model, str(tmp_path / "r"), str(times)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ.copy()
    )
    deadline = time.monotonic() + 90
    while not metrics_of(tmp_path / "r") and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    if times == 2:
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    steps = len(metrics_of(tmp_path / "r"))
    if times == 1:
        assert process.returncode == 0, err
        assert out.split() == ["interrupted", str(steps), str(tmp_path / "r" / "checkpoints" / f"step-{steps}")]
        assert "and writing a checkpoint" in err
    else:
        assert process.returncode == 130, err
        assert "stopped at once. Nothing was kept: no checkpoint had been written. Begin again with: MRLTrainer(" in err
        assert newest_checkpoint(tmp_path / "r") is None
