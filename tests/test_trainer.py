"""Whole runs on a tiny model: the reward goes up, and everything is recorded."""

from __future__ import annotations

import asyncio
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from mrl.loop.recorded_run import RunResult
from mrl.store.checkpoints import list_checkpoints
from mrl.store.run import read_rows
from tests.letter_runs import TASKS, metrics_of, run, share_of_a
from tests.small_runs import distinct
from tests.soak import slow_but

TALKS = [{"id": "t0", "prompt": [{"role": "user", "content": "say a"}], "want": "a"}]


@pytest.fixture(scope="module")
def learned(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("learned") / "r"
    assert run(tiny_model, folder, max_steps=25, num_generations=8).status == "finished"
    return folder


@pytest.mark.parametrize("sync", slow_but(("direct",), ("direct", "reload")))
def test_the_reward_goes_up(tiny_model: str, learned: Path, tmp_path: Path, sync: str) -> None:
    folder = learned if sync == "direct" else tmp_path / "r"
    if sync != "direct":
        run(tiny_model, folder, max_steps=25, num_generations=8, weight_sync_method=sync)
    rewards = [row["reward/mean"] for row in metrics_of(folder)]
    assert sum(rewards[:3]) / 3 < 0.05
    assert sum(rewards[-3:]) / 3 > 0.8
    assert max(row.get("train/logprob_gap_max", 0.0) for row in metrics_of(folder)) < 1e-4


@pytest.mark.slow
def test_nothing_is_learned_from_shuffled_rewards(tiny_model: str, tmp_path: Path) -> None:
    """The same rewards, dealt out at random within each batch."""
    dice = random.Random(0)

    def shuffled(**columns: Any) -> list[float]:
        return dice.sample(rewards := share_of_a(**columns), len(rewards))

    run(tiny_model, tmp_path / "r", max_steps=25, num_generations=8, reward_funcs=shuffled)
    rewards = [row["reward/mean"] for row in metrics_of(tmp_path / "r")]
    assert max(rewards) < 0.2


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


@pytest.mark.usefixtures("pictures")
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
    assert list_checkpoints(folder)[-1].path == result.checkpoint
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
    log = tmp_path / "seen"

    async def reward(
        prompts: list[Any], completions: list[Any], completion_ids: list[Any], trainer_state: Any, **_: Any
    ):
        await asyncio.sleep(0)
        with log.open("a") as file:
            print(json.dumps([prompts[0], completions[0], trainer_state.global_step]), file=file)
        return [float(len(ids)) for ids in completion_ids]

    tasks = [{"prompt": [{"role": "user", "content": f"hi {i}"}]} for i in range(4)]

    def letters(completions: list[Any], **_: Any) -> list[float]:
        return [float(len(completion)) for completion in completions]

    options = {"train_dataset": tasks, "reward_funcs": [reward, letters], "system_prompt": "be brief"}
    run(tiny_model, tmp_path / "r", max_steps=1, **options)
    notices = [row["message"] for row in read_rows(tmp_path / "r", "events") if row["kind"] == "notice"]
    assert len(notices) == 1, "the other one is right, and defaults need none"
    assert "letters gives 1 and 1 for completions as messages and 16 and" in notices[0]
    seen = [json.loads(line) for line in log.read_text().splitlines()]
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


def test_a_result_is_readable(tiny_model: str, tmp_path: Path) -> None:
    folder = tmp_path / "my run"
    result = run(tiny_model, folder, reward_funcs=distinct, eval_dataset=TASKS[:2], max_steps=2)
    lines = repr(result).splitlines()
    first, last = (metrics_of(folder)[step]["reward/mean"] for step in (0, -1))
    assert re.fullmatch(r"RunResult: finished after 2 steps, \d+ s", lines[0])
    assert lines[1].startswith(f"  reward {first:.3f} → {last:.3f}, held-out pass rate ")
    assert lines[-2:] == [f"  in {folder}", f"  next: mrl sample '{folder}' 'your prompt'"]
    assert len(lines) <= 6


def test_training_works_where_an_event_loop_is_running(tiny_model: str, tmp_path: Path) -> None:
    async def notebook() -> RunResult:
        return run(tiny_model, tmp_path / "r", max_steps=1)

    assert asyncio.run(notebook()).status == "finished"


@pytest.mark.slow
def test_training_goes_on_from_a_run(learned: Path, tmp_path: Path) -> None:
    run(str(learned), tmp_path / "second", max_steps=1)
    reached, start = (metrics_of(folder)[at]["reward/mean"] for folder, at in ((learned, -1), (tmp_path / "second", 0)))
    assert start > 0.5 * reached > 0.3
