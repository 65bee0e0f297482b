"""Whole runs that generate while they train."""

from __future__ import annotations

import asyncio
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mrl.config import ModelConfig
from mrl.engines.transformers.engine import TransformersEngine
from mrl.errors import ConfigError
from mrl.loop.recorded_run import RunResult
from mrl.loop.replay import replay
from mrl.store.checkpoints import list_checkpoints
from mrl.store.filters import Filter
from mrl.store.read import RunReader
from mrl.store.run import read_rows
from mrl.types import TokenSequence, WeightRef
from tests import small_runs
from tests.lent import lent
from tests.small_runs import distinct
from tests.soak import but

TASKS = [{"prompt": "say " + "x" * (i % 3) + str(i)} for i in range(7)]


def train(model: str, folder: Path, **changes: Any) -> RunResult:
    defaults = {"train_dataset": TASKS, "max_completion_length": 8, "max_steps": 6, "save_steps": 0}
    return small_runs.run(model, folder, **(defaults | changes))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(list_checkpoints(folder)[-1].path / "model.safetensors")


def equal(left: Path, right: Path) -> bool:
    mine, theirs = weights(left), weights(right)
    return all(torch.equal(mine[name], theirs[name]) for name in mine)


def rollouts(folder: Path) -> list[dict[str, Any]]:
    with RunReader(folder) as reader:
        return list(reader.rollouts(Filter()))


def test_at_staleness_0_it_is_the_synchronous_run(tiny_model: str, tmp_path: Path) -> None:
    train(tiny_model, tmp_path / "off")
    train(tiny_model, tmp_path / "queue", async_mode="queue", max_staleness=0)
    assert equal(tmp_path / "off", tmp_path / "queue")
    for name in ("off", "queue"):
        steps = [row["step"] for row in rollouts(tmp_path / name)]
        assert steps == sorted(steps)
    left, right = ([(r["id"], r["samples"], r["reward"]) for r in rollouts(tmp_path / n)] for n in ("off", "queue"))
    assert left == right


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", but(({"beta": 0.1, "num_rollout_workers": 2},), [{}, {"beta": 0.1, "num_rollout_workers": 2}])
)
def test_a_pipelined_run_is_the_same_every_time_and_after_a_resume(
    tiny_model: str, tmp_path: Path, changes: dict[str, Any]
) -> None:
    changes = {"async_mode": "pipeline", "save_steps": 1, "max_steps": 5, **changes}
    train(tiny_model, tmp_path / "whole", **changes)
    train(tiny_model, tmp_path / "again", **changes)
    assert equal(tmp_path / "whole", tmp_path / "again")
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    for later in list_checkpoints(tmp_path / "parts")[3:]:  # as if it had been killed after the third
        shutil.rmtree(later.path)
    train(tiny_model, tmp_path / "parts", resume="auto", **changes)
    assert equal(tmp_path / "whole", tmp_path / "parts")
    left, right = ([(r["id"], r["samples"], r["reward"]) for r in rollouts(tmp_path / n)] for n in ("whole", "parts"))
    assert left == right


def test_pipelined_rollouts_are_one_version_old(tiny_model: str, tmp_path: Path) -> None:
    train(tiny_model, tmp_path, async_mode="pipeline")
    found = {row["step"]: {s["policy_version"] for s in row["samples"]} for row in rollouts(tmp_path)}
    assert found == {step: {max(step - 2, 0)} for step in range(1, 7)}
    for row in read_rows(tmp_path, "metrics"):
        assert row["rollout/staleness_mean"] == row["rollout/staleness_max"] == min(row["step"] - 1, 1)
        assert row["time/wait"] >= 0


@pytest.mark.parametrize(
    "changes",
    but(
        ({},),
        [
            {},
            {"in_flight_updates": False},
            {"over_sampling": 2.0},
            {"max_staleness": 3, "num_rollout_workers": 2},
            {"beta": 0.1},
            {"zero_variance_groups": "resample", "max_resamples": 2},
        ],
    ),
)
def test_a_queue_keeps_its_promises(tiny_model: str, tmp_path: Path, changes: dict[str, Any]) -> None:
    """No token is older than allowed, every step is whole, and versions in the record are those of the tokens."""
    train(tiny_model, tmp_path, async_mode="queue", max_steps=10, max_completion_length=24, **changes)
    rows = list(read_rows(tmp_path, "metrics"))
    assert [row["step"] for row in rows] == list(range(1, 11))
    oldest = changes.get("max_staleness", 1)
    for rollout in rollouts(tmp_path):
        if rollout["status"] == "failed":
            assert rollout["error"].startswith("dropped: ")
            continue
        for sample in rollout["samples"]:
            versions = sample["policy_version"]
            versions = [versions] if isinstance(versions, int) else versions
            assert versions == sorted(versions)
            assert rollout["step"] - 1 - versions[0] <= oldest
            if changes.get("in_flight_updates") is False:
                assert len(set(versions)) == 1
    assert max(row["rollout/staleness_max"] for row in rows) <= oldest
    assert max(row["rollout/staleness_max"] for row in rows) > 0, "it never ran ahead"


LONG = {
    "async_mode": "queue", "max_staleness": 3, "max_completion_length": 48, "max_steps": 8, "save_steps": 1,
    "learning_rate": 3e-3,
}  # fmt: skip


def overtaken(model: str, folder: Path) -> int:
    """How many completions were sampled by several versions. Checks that each of their tokens has the logprob that the
    version it carries gives it; the run has a checkpoint of every version."""
    engine = TransformersEngine.create(ModelConfig(model=model, device="cpu", max_model_len=128))
    paths: dict[int, str | None] = {0: None} | {c.step: str(c.path) for c in list_checkpoints(folder)}
    samples = [sample for rollout in rollouts(folder) for sample in rollout["samples"]]
    mixed = [s for s in samples if isinstance(s["policy_version"], list) and len(set(s["policy_version"])) > 1]
    for version, path in paths.items():
        if path is not None:
            engine.load_weights(WeightRef(version, path=path))
        for sample in mixed[:12]:
            sequence = TokenSequence(tuple(sample["prompt_ids"]), tuple(sample["completion_ids"]))
            scored = asyncio.run(engine.logprobs([sequence]))[0]
            for mine, theirs, sampled_by in zip(scored, sample["logprobs"], sample["policy_version"], strict=True):
                assert sampled_by != version or abs(mine - theirs) < 1e-4
    engine.close()
    return len(mixed)


@pytest.mark.slow
def test_each_token_has_the_logprob_of_the_version_it_carries(tiny_model: str, tmp_path: Path) -> None:
    train(tiny_model, tmp_path, **LONG)
    assert overtaken(tiny_model, tmp_path), "no completion was overtaken by an update"


@pytest.mark.vllm
@pytest.mark.parametrize("changes", [{}, {"weight_sync_method": "direct"}, {"use_lora": True, "lora_r": 8}])
def test_vllm_takes_new_weights_in_the_middle_of_completions(
    vllm_model: str, tmp_path: Path, changes: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    kind = "running_vllm_with_adapters" if "use_lora" in changes else "running_vllm"
    with lent(request.getfixturevalue(kind)) as name:
        train(vllm_model, tmp_path, **{**LONG, **changes, "engine": name, "max_completion_length": 80})
    rows = list(read_rows(tmp_path, "metrics"))
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert max(row["rollout/staleness_max"] for row in rows) in (1, 2, 3)
    if "use_lora" not in changes:
        assert overtaken(vllm_model, tmp_path)


@pytest.mark.slow
def test_over_sampling_takes_those_that_end_first(tiny_model: str, tmp_path: Path) -> None:
    train(tiny_model, tmp_path, over_sampling=2.0, max_completion_length=24)
    rows = list(read_rows(tmp_path, "metrics"))
    assert sum(row["rollout/stopped_groups"] + row["rollout/unused_groups"] for row in rows) > 0
    assert all(row["rollout/staleness_max"] == 0 for row in rows)
    unused = [
        r for r in rollouts(tmp_path) if (r["error"] or "").startswith("unused: it ended when its step had enough")
    ]
    assert len(unused) == 3 * sum(row["rollout/unused_groups"] for row in rows)
    step = max((rollout["step"] for rollout in unused), default=1)
    assert replay(tmp_path, step).exact, "what was not used plays no part"
    assert all(row["train/logprob_gap_max"] < 1e-4 for row in rows if "train/logprob_gap_max" in row)


@pytest.mark.slow
def test_an_interrupted_queue_goes_on_with_what_was_in_flight(tiny_model: str, tmp_path: Path) -> None:
    """Every task once in each epoch: none is lost or attempted twice because the run stopped in the middle."""
    calls = {"count": 0}

    def interrupting(completions: list[str], **_: Any) -> list[float]:
        calls["count"] += 1
        if calls["count"] == 5:
            signal.raise_signal(signal.SIGINT)
        return distinct(completions)

    options = {"async_mode": "queue", "max_staleness": 2, "max_steps": 8, "batch_size": 2}
    first = train(tiny_model, tmp_path, reward_funcs=interrupting, **options)
    assert first.status == "interrupted"
    assert 0 < first.steps < 8
    second = train(tiny_model, tmp_path, reward_funcs=interrupting, resume="auto", **options)
    assert (second.status, second.steps) == ("finished", 8)
    counts: dict[str, int] = {}
    for rollout in rollouts(tmp_path):
        counts[rollout["task_id"]] = counts.get(rollout["task_id"], 0) + 1
    dropped = sum(row["rollout/dropped_groups"] for row in read_rows(tmp_path, "metrics"))
    if not dropped:
        assert sorted(counts.values()) == [6] * 5 + [9] * 2  # 16 groups: two epochs of 7 tasks and 2 of the third


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_staleness": 2}, "max_staleness has an effect only with async_mode='queue'"),
        pytest.param(
            {"async_mode": "pipeline", "weight_sync_method": "direct"},
            "async_mode='pipeline': pipeline needs rollout workers",
            marks=pytest.mark.inline("its subject is a module that is shared"),
        ),
        ({"async_mode": "queue", "sync_weights_every": 2}, "sync_weights_every=2: weights are sent after every step"),
        ({"async_mode": "queue", "max_staleness": 0, "over_sampling": 2.0}, "over_sampling=2.0: with async_mode queue"),
        ({"async_mode": "pipeline", "zero_variance_groups": "resample"}, "groups='resample': resample does not go"),
        pytest.param(
            {"over_sampling": 2.0, "weight_sync_method": "direct"},
            "over_sampling=2.0: .*use weight_sync_method='reload'",
            marks=pytest.mark.inline("its subject is a module that is shared"),
        ),
        (
            {"async_mode": "queue", "stale_rollouts": "correct", "importance_sampling": "none"},
            "stale_rollouts='correct': correct needs importance_sampling",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(
    tiny_model: str, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        train(tiny_model, tmp_path, **changes)


def test_off_is_a_word_that_yaml_reads_as_false() -> None:
    from mrl.config import OrchestratorConfig

    assert OrchestratorConfig.from_flat(async_mode=False).overlap.async_mode == "off"
