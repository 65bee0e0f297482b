"""A recorded step computed again: exactly, but for rounding, or not."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import mrl.actor.worker as actor_module
import mrl.loop.replay as replay_module
import mrl.system.environment as environment_module
from mrl.cli.main import main
from mrl.errors import ConfigError
from mrl.loop.replay import TOKEN_TOLERANCE, TOLERANCE, Difference, replay
from mrl.store.checkpoints import list_checkpoints
from mrl.store.run import read_rows
from mrl.types import Group, Rollout
from tests.small_runs import run
from tests.soak import slow_but


@pytest.mark.parametrize(
    "changes", slow_but([{"num_iterations": 2}], [{}, {"use_lora": True, "beta": 0.1}, {"num_iterations": 2}])
)
def test_replay_recomputes_a_step_exactly(tiny_model: str, tmp_path: Path, changes: dict[str, Any]) -> None:
    run(tiny_model, tmp_path / "r", save_steps=2, max_steps=6, **changes)
    for step in (1, 3, 6):  # from the start, from the checkpoint just before, over a step in between
        result = replay(tmp_path / "r", step)
        assert result.checkpoint == {1: 0, 3: 2, 6: 4}[step]
        assert {"train/loss", "train/grad_norm", "train/entropy"} <= {m.name for m in result.metrics}
        assert [m for m in result.metrics if m.difference != 0.0] == []
        assert result.verdict == "equal"
        assert result.changed == []
        assert result.gradient_norms
    with pytest.raises(ConfigError, match="has no step 9"):
        replay(tmp_path / "r", 9)


def test_replay_shows_what_was_tampered_with(tiny_model: str, tmp_path: Path) -> None:
    run(tiny_model, tmp_path / "r", max_steps=2)
    run(tiny_model, tmp_path / "other", max_steps=2, seed=5)
    shutil.rmtree(tmp_path / "r" / "checkpoints" / "step-1")
    shutil.copytree(tmp_path / "other" / "checkpoints" / "step-1", tmp_path / "r" / "checkpoints" / "step-1")
    result = replay(tmp_path / "r", 2)
    assert result.verdict == "different"
    assert any(m.name == "train/logprob_gap_max" and m.difference > 1e-4 for m in result.metrics)


def test_replay_shows_one_token_and_one_advantage_that_are_wrong(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The smallest faults of interest, beside what other numbers of threads do to the last bits."""
    run(tiny_model, tmp_path / "r", max_steps=1, batch_size=6, num_generations=8, max_completion_length=24)
    stored = replay_module._groups

    def best(group: Group) -> Rollout:
        return max(group.rollouts, key=lambda rollout: rollout.reward or 0.0)

    def one_logprob(group: Group) -> None:
        best(group).samples[0].logprobs[0] -= 0.01

    def one_reward(group: Group) -> None:
        best(group).reward = min(rollout.reward or 0.0 for rollout in group.rollouts)

    for change, name in ((one_logprob, "train/logprob_gap_max"), (one_reward, "train/grad_norm")):

        def groups(run: Path, step: int, change: Any = change) -> list[Group]:
            found = stored(run, step)
            change(next(group for group in found if len({rollout.reward for rollout in group.rollouts}) > 1))
            return found

        monkeypatch.setattr(replay_module, "_groups", groups)
        result = replay(tmp_path / "r", 1)
        assert result.verdict == "different"
        assert name in {m.name for m in result.metrics if not m.is_rounding(result.tolerance, result.token_tolerance)}


@pytest.mark.parametrize(
    ("name", "recorded", "replayed", "rounding"),
    [
        ("train/grad_norm", 0.1144179404, 0.1144179627, True),
        ("train/grad_norm", 0.1144, 0.1150, False),
        ("train/loss", -1.2e-9, 3.4e-9, True),  # a sum that cancels: nothing is left of it but rounding
        ("train/loss", -0.0176, -0.0177, False),
        ("train/logprob_gap", 4.6e-7, 4.5e-7, True),
        ("train/logprob_gap", 4.6e-7, 2e-4, False),
        ("train/logprob_gap_max", 4.6e-6, 1.2e-5, True),
        ("train/logprob_gap_max", 4.6e-6, 0.01, False),
        ("train/logprob_gap_max", 4.6e-6, float("nan"), False),
        ("train/tokens", 9999.0, 10000.0, False),
        ("train/learning_rate", 1e-3, 1.0001e-3, False),
    ],
)
def test_what_rounding_can_do_to_a_metric(name: str, recorded: float, replayed: float, rounding: bool) -> None:
    found = Difference(name, recorded, replayed).is_rounding(TOLERANCE["float32"], TOKEN_TOLERANCE["float32"])
    assert found is rounding


@pytest.mark.slow
@pytest.mark.inline("it changes what the actor says of its threads")
def test_threads_are_recorded_replayed_with_and_named_when_a_run_goes_on_with_others(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[int] = []
    step = actor_module.ActorWorker.train_step

    def train_step(self: Any, batch: Any) -> dict[str, float]:
        seen.append(torch.get_num_threads())
        metrics = step(self, batch)
        metrics["train/grad_norm"] *= 1 + error
        return metrics

    def as_if_with(threads: int) -> None:
        def environment(device: Any) -> dict[str, Any]:
            return environment_module.computing_environment(device) | {"threads": threads}

        monkeypatch.setattr(actor_module, "computing_environment", environment)

    error = 0.0
    mine = torch.get_num_threads()
    as_if_with(2)
    run(tiny_model, tmp_path / "r", max_steps=1)
    as_if_with(1)
    run(tiny_model, tmp_path / "r", max_steps=2, resume="auto")
    events = [row["message"] for row in read_rows(tmp_path / "r", "events")]
    assert "from here on the last bits may be others than without the stop: threads 2 → 1" in events
    for checkpoint in list_checkpoints(tmp_path / "r"):
        shutil.rmtree(checkpoint.path)
    monkeypatch.setattr(actor_module.ActorWorker, "train_step", train_step)
    result = replay(tmp_path / "r", 2)
    assert seen == [2, 1]
    assert result.environment["threads"] == 1
    assert result.changed == []
    assert replay(tmp_path / "r", 1).environment["threads"] == 2
    assert torch.get_num_threads() == mine

    monkeypatch.setattr(replay_module, "computing_environment", lambda device: {"threads": 2, "processor": "another"})
    for error, code, words in ((1e-6, 3, "but for rounding"), (0.1, 4, "not what was recorded")):  # noqa: B007
        with pytest.raises(SystemExit) as stopped:
            main(["replay", str(tmp_path / "r"), "--step", "1"])
        assert stopped.value.code == code
        out = " ".join(capsys.readouterr().out.split())
        assert words in out
        assert "→ another" in out
