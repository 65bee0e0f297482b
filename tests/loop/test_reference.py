"""Reference logprobs are asked for while the rewards are being computed, and are those a step would compute itself."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from mrl import MRLTrainer
from mrl.actor.worker import ActorWorker
from mrl.store.run import read_rows

TASKS = [{"prompt": f"count to {n}"} for n in range(4)]


def train(model: str, run: Path, reward: Any) -> None:
    MRLTrainer(
        model=model,
        train_dataset=TASKS,
        reward_funcs=reward,
        max_steps=2,
        batch_size=2,
        num_generations=3,
        max_completion_length=12,
        temperature=1.0,
        top_p=1.0,
        beta=0.1,
        learning_rate=1e-3,
        run_dir=str(run),
        report_to=[],
    ).train()


def length_reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(ids) % 7 / 7 for ids in completion_ids]


@pytest.mark.inline("actor and reward function meet at an event of this process")
def test_the_reference_is_asked_while_rewards_are_computed(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Event()
    original = ActorWorker.reference_logprobs

    def noticed(self: ActorWorker, *args: Any) -> list[list[float]]:
        answer = original(self, *args)
        asked.set()
        return answer

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        if completion_ids == [[0], [0]]:  # made up, before the run
            return [0.0, 0.0]
        assert asked.wait(20), "the reference was not asked while the reward was running"
        asked.clear()
        return length_reward(completion_ids)

    monkeypatch.setattr(ActorWorker, "reference_logprobs", noticed)
    train(tiny_model, tmp_path / "run", reward)
    rows = list(read_rows(tmp_path / "run", "metrics"))
    assert all(row["train/kl"] >= 0 and row["time/reference"] > 0 for row in rows)


def test_asked_beforehand_or_in_the_step_is_the_same(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tiny_model, tmp_path / "before", length_reward)

    async def later(*_: Any) -> None:
        """The loop asks for what is not known."""

    monkeypatch.setattr("mrl.loop.producer.add_reference_logprobs", later)
    train(tiny_model, tmp_path / "within", length_reward)
    before, within = (list(read_rows(tmp_path / name, "metrics"))[-1] for name in ("before", "within"))
    assert before["train/kl"] == pytest.approx(within["train/kl"], rel=1e-3)
    assert before["train/loss"] == pytest.approx(within["train/loss"], rel=1e-3, abs=1e-6)
