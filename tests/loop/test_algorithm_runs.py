"""The algorithms through whole runs: from an option to what the trained model and the record show."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mrl.loop.replay import replay
from mrl.store.checkpoints import list_checkpoints
from mrl.store.run import read_rows
from mrl.types import Rollout
from tests import small_runs
from tests.small_runs import distinct, record_of

TASKS = [{"prompt": f"say {i}"} for i in range(7)]


def short(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(len(ids) < 6) for ids in completion_ids]


def rarely(completions: list[str], **_: Any) -> list[float]:
    """The same for all of most groups: whether one letter in twenty is there."""
    return [float(any(c in text for c in "abcdefghij")) for text in completions]


def run(model: str, folder: Path, **changes: Any) -> list[dict[str, Any]]:
    defaults = {
        "train_dataset": TASKS,
        "max_steps": 3,
        "batch_size": 3,
        "num_generations": 4,
        "max_completion_length": 8,
        "learning_rate": 1e-2,
        "weight_sync_method": "direct",
    }
    small_runs.run(model, folder, **(defaults | changes))
    return list(read_rows(folder, "metrics"))


def rollouts_of(folder: Path) -> list[dict[str, Any]]:
    return list(read_rows(folder, "rollouts"))


@pytest.mark.parametrize(
    ("options", "metrics"),
    [
        ({"loss_type": "gspo", "epsilon": 3e-4, "epsilon_high": 4e-4, "num_iterations": 2}, {"train/ratio"}),
        pytest.param({"loss_type": "luspo"}, {"train/clipped_high_fraction"}, marks=pytest.mark.slow),
        pytest.param({"loss_type": "vespo", "num_iterations": 2}, {"train/ratio_max"}, marks=pytest.mark.slow),
        ({"loss_type": "reinforce", "advantage_type": "rloo"}, {"train/loss"}),
        ({"advantage_type": "gdpo", "reward_funcs": [distinct, short]}, {"reward/short/mean"}),
        pytest.param({"advantage_type": "token", "discount": 0.9}, {"train/loss"}, marks=pytest.mark.slow),
        (
            {"importance_sampling": "sequence_masked", "importance_sampling_cap": 1.5},
            {"train/importance_masked_fraction"},
        ),
        pytest.param({"top_entropy_quantile": 0.2}, {"train/top_entropy_fraction"}, marks=pytest.mark.slow),
        pytest.param({"beta": 0.1, "kl_estimator": "k2"}, {"train/kl"}, marks=pytest.mark.slow),
        ({"beta": 0.1, "kl_in": "reward", "use_lora": True, "lora_r": 4, "lora_alpha": 8}, {"reward/kl_shaping"}),
    ],
    ids=["gspo", "luspo", "vespo", "reinforce_rloo", "gdpo", "token", "sequence_masked", "top_entropy", "k2", "lora"],
)
def test_a_run_trains_and_says_what_it_did(
    tiny_model: str, tmp_path: Path, options: dict[str, Any], metrics: set[str]
) -> None:
    rows = run(tiny_model, tmp_path / "r", **options)
    assert metrics <= set(rows[0])
    for row in rows:
        assert row["train/updates_skipped"] == 0
        assert row["train/grad_norm"] > 0
    newest = list_checkpoints(tmp_path / "r")[-1].path
    if options.get("use_lora"):
        trained = load_file(newest / "adapter_model.safetensors")
        assert any(value.abs().max() > 0 for name, value in trained.items() if "lora_B" in name)
    else:
        before, after = load_file(Path(tiny_model) / "model.safetensors"), load_file(newest / "model.safetensors")
        assert any(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.slow
def test_gspo_clips_sequences_and_top_entropy_keeps_a_share(tiny_model: str, tmp_path: Path) -> None:
    clipped = run(tiny_model, tmp_path / "g", loss_type="gspo", epsilon=3e-4, epsilon_high=4e-4, num_iterations=3)
    assert sum(row["train/clipped_high_fraction"] + row["train/clipped_low_fraction"] for row in clipped) > 0.1
    kept = run(tiny_model, tmp_path / "t", top_entropy_quantile=0.25, gradient_accumulation_steps=3)
    assert all(row["train/top_entropy_fraction"] == pytest.approx(0.25, abs=0.03) for row in kept)


def test_rloo_is_what_is_recorded(tiny_model: str, tmp_path: Path) -> None:
    run(tiny_model, tmp_path / "r", advantage_type="rloo", max_steps=1)
    rows = rollouts_of(tmp_path / "r")
    for row in rows:
        others = [o["reward"] for o in rows if o["task_id"] == row["task_id"] and o["attempt"] != row["attempt"]]
        assert row["advantage"] == pytest.approx(row["reward"] - sum(others) / len(others))


def test_the_divergence_in_the_reward_is_that_of_the_moved_policy(tiny_model: str, tmp_path: Path) -> None:
    """Zero before the first update, then RLOO's: the sum of log π/π_ref, times -beta, beside an untouched reward."""
    rows = run(
        tiny_model, tmp_path / "r", beta=0.5, kl_in="reward", kl_estimator="k1", advantage_type="rloo", save_steps=1
    )
    assert rows[0]["reward/kl_shaping"] == pytest.approx(0.0, abs=1e-5)
    assert abs(rows[2]["reward/kl_shaping"]) > 1e-3
    assert rows[2]["reward/shaped_mean"] == pytest.approx(rows[2]["reward/mean"] + rows[2]["reward/kl_shaping"])
    assert "train/kl" not in rows[2]  # it is not in the loss as well
    assert "time/reference" in rows[2]

    from transformers import AutoModelForCausalLM

    moved = AutoModelForCausalLM.from_pretrained(list_checkpoints(tmp_path / "r")[1].path)
    first = AutoModelForCausalLM.from_pretrained(tiny_model)
    row = next(row for row in rollouts_of(tmp_path / "r") if row["step"] == 3)
    sample = row["samples"][0]
    ids, start = torch.tensor([sample["prompt_ids"] + sample["completion_ids"]]), len(sample["prompt_ids"])
    with torch.no_grad():
        log_p, log_ref = (torch.log_softmax(m(ids).logits[0, start - 1 : -1], -1) for m in (moved, first))
    targets = ids[0, start:, None]
    kl = (log_p.gather(1, targets) - log_ref.gather(1, targets)).sum().item()
    assert row["metrics"]["shaping/kl"] == pytest.approx(-0.5 * kl, abs=1e-4)


def test_overlong_shaping_reaches_the_advantage_and_leaves_the_reward(tiny_model: str, tmp_path: Path) -> None:
    options = {"soft_punish_cache": 4, "overlong_penalty": 2.0, "length_penalty": 0.5, "scale_rewards": "none"}
    rows = run(tiny_model, tmp_path / "r", **options, max_completion_length=8, stop=["a", "e", "i", "o"], max_steps=1)
    recorded = rollouts_of(tmp_path / "r")
    for row in recorded:
        length = len(row["samples"][0]["completion_ids"])
        assert row["metrics"]["shaping/overlong"] == pytest.approx(-2.0 * max(0, length - 4) / 4)
        assert row["reward"] == row["rewards"]["distinct"]
    shaped = [row["reward"] + sum(row["metrics"].values()) for row in recorded]
    for row, own in zip(recorded, shaped, strict=True):
        group = [s for r, s in zip(recorded, shaped, strict=True) if r["group"] == row["group"]]
        assert row["advantage"] == pytest.approx(own - sum(group) / len(group), abs=1e-9)
    assert rows[0]["reward/shaped_mean"] == pytest.approx(sum(shaped) / len(shaped))
    assert {"reward/overlong_shaping", "reward/length_shaping"} <= set(rows[0])


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny_model", "untied_model"])
def test_the_entropy_bonus_raises_the_entropy(model: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(model)
    spread = {}
    for coefficient in (-1.0, 1.0):
        options = {"entropy_coef": coefficient, "max_steps": 6, "learning_rate": 1e-3, "prompt_format": "text"}
        rows = run(folder, tmp_path / str(coefficient), **options)
        spread[coefficient] = rows[-1]["train/entropy"] - rows[0]["train/entropy"]
    assert spread[-1.0] < 0 < spread[1.0]


# --- dynamic sampling -------------------------------------------------------------------------------------------------


def groups_of(folder: Path, step: int) -> dict[int, set[float]]:
    rewards: dict[int, set[float]] = {}
    for row in rollouts_of(folder):
        if row["step"] == step:
            rewards.setdefault(row["group"], set()).add(row["reward"])
    return rewards


def test_groups_that_agree_are_dropped_or_replaced(tiny_model: str, tmp_path: Path) -> None:
    options = {
        "reward_funcs": rarely,
        "num_generations": 2,
        "batch_size": 4,
        "max_steps": 4,
        "max_completion_length": 4,
    }
    dropped = run(tiny_model, tmp_path / "drop", zero_variance_groups="drop", **options)
    resampled = run(tiny_model, tmp_path / "more", zero_variance_groups="resample", max_resamples=4, **options)
    for rows, name in ((dropped, "drop"), (resampled, "more")):
        for row in rows:
            groups = groups_of(tmp_path / name, row["step"])
            assert row["rollout/groups"] == len(groups)
            assert row["rollout/groups_dropped"] == sum(len(rewards) == 1 for rewards in groups.values())
    assert all(row["rollout/groups"] <= 4 for row in dropped)
    assert any(row["rollout/groups_dropped"] > 0 for row in dropped)
    assert all(row["rollout/resamples"] <= 4 for row in resampled)
    assert any(row["rollout/resamples"] > 0 for row in resampled)
    for row in resampled:
        assert row["rollout/groups"] - row["rollout/groups_dropped"] == 4 or row["rollout/resamples"] == 4
    assert resampled[-1]["rollout/epoch"] > dropped[-1]["rollout/epoch"]  # further tasks, not the same ones again
    for row in resampled:  # a task that comes round again within a step is attempted anew
        seen = Counter(
            (r["task_id"], tuple(r["samples"][0]["completion_ids"]))
            for r in rollouts_of(tmp_path / "more")
            if r["step"] == row["step"]
        )
        assert max(seen.values()) == 1


def test_a_step_in_which_every_group_agrees_makes_no_update(tiny_model: str, tmp_path: Path) -> None:
    def same(completions: list[str], **_: Any) -> list[float]:
        return [0.1] * len(completions)

    rows = run(
        tiny_model, tmp_path / "r", reward_funcs=same, zero_variance_groups="resample", max_resamples=2, max_steps=1
    )
    assert rows[0]["rollout/resamples"] == 2
    assert rows[0]["rollout/groups"] == rows[0]["rollout/groups_dropped"] == 9
    assert rows[0]["train/tokens"] == 0
    notices = [row["message"] for row in read_rows(tmp_path / "r", "events")]
    assert any("no group of rollouts differed in reward (see zero_variance_groups)" in message for message in notices)


SAME_RUN = {
    "reward_funcs": rarely,
    "zero_variance_groups": "resample",
    "num_generations": 3,
    "max_completion_length": 4,
    "weight_sync_method": "reload",
    "beta": 0.1,
    "kl_in": "reward",
    "soft_punish_cache": 2,
    "entropy_coef": 0.01,
    "top_entropy_quantile": 0.5,
    "max_steps": 5,
}


@pytest.mark.slow
def test_a_resumed_run_samples_what_an_uninterrupted_one_does(tiny_model: str, tmp_path: Path) -> None:
    rows = run(tiny_model, tmp_path / "whole", **SAME_RUN)
    assert sum(row["rollout/resamples"] for row in rows) > 1
    for stop in (1, 2, 4):
        folder = tmp_path / f"cut{stop}"
        shutil.copytree(tmp_path / "whole", folder)
        for checkpoint in list_checkpoints(folder):
            if checkpoint.step > stop:
                shutil.rmtree(checkpoint.path)
        run(tiny_model, folder, **SAME_RUN, resume="auto")
        assert record_of(folder) == record_of(tmp_path / "whole")


@pytest.mark.slow
def test_replay_recomputes_shaped_and_resampled_steps_exactly(tiny_model: str, tmp_path: Path) -> None:
    run(tiny_model, tmp_path / "r", **SAME_RUN)
    for step in (1, 3, 5):
        assert replay(tmp_path / "r", step).exact


def test_steps_that_are_more_than_the_turns_fail_the_rollout(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rollouts with rewards by step come from environments; here they are put beside those of a single turn."""
    import mrl.rollouts.single_turn as single_turn

    made = 0

    def with_steps(**fields: Any) -> Rollout:
        nonlocal made
        made += 1
        return Rollout(**fields, step_rewards=[0.1, 0.2] if made == 1 else [0.1])

    monkeypatch.setattr(single_turn, "Rollout", with_steps)
    rows = run(tiny_model, tmp_path / "r", advantage_type="turn", max_steps=1)
    failed = [row for row in rollouts_of(tmp_path / "r") if row["status"] == "failed"]
    assert [row["error"] for row in failed] == ["advantage_type turn: 2 step rewards for 1 turns of sampled tokens"]
    assert rows[0]["rollout/failed_fraction"] == pytest.approx(1 / 12)


def share_of_a(completions: list[str], **_: Any) -> list[float]:
    return [text.count("a") / max(len(text), 1) for text in completions]


@pytest.mark.soak
@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "gspo", "epsilon": 3e-3, "epsilon_high": 4e-3},
        {"loss_type": "luspo"},
        {"loss_type": "vespo", "advantage_type": "reinforce_pp_baseline"},
        {"loss_type": "cispo", "advantage_type": "reinforce_pp"},
        {"loss_type": "reinforce", "advantage_type": "rloo", "normalize_advantages": True},
        {"loss_type": "sapo", "advantage_type": "maxrl"},
        {"advantage_type": "gdpo", "zero_variance_groups": "resample"},
        {"beta": 0.01, "kl_in": "reward", "advantage_type": "token", "discount": 0.9},
        {"top_entropy_quantile": 0.8, "entropy_coef": 1e-3, "importance_sampling": "sequence_truncated"},
    ],
    ids=["gspo", "luspo", "vespo", "cispo", "reinforce", "sapo", "gdpo", "token", "entropy"],
)
def test_every_kind_of_run_learns(tiny_model: str, tmp_path: Path, options: dict[str, Any]) -> None:
    more = {"reward_funcs": share_of_a, "max_steps": 34, "batch_size": 4, "num_generations": 8, "save_steps": 0}
    rewards = [row["reward/mean"] for row in run(tiny_model, tmp_path / "r", **more, **options)]
    assert sum(rewards[:3]) / 3 < 0.05
    assert sum(rewards[-3:]) / 3 > 0.5
