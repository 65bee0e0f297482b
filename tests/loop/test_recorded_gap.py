"""What the record has of each token: the trainer's gap to the sampler, the policy version, advantages by token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mrl import MRLTrainer
from mrl.experience.batch import note_per_token
from mrl.store.arrays import decode_samples, encode_samples
from mrl.store.filters import Filter
from mrl.store.read import RunReader
from mrl.types import Sample, TrainBatch


def lengths(completions: list[str], **_: Any) -> list[float]:
    return [len(set(text)) / 8 for text in completions]


def test_the_gap_of_tokens_is_the_gap_of_the_step(tiny_model: str, tmp_path: Path) -> None:
    tasks = [{"prompt": f"say {i}"} for i in range(4)]
    sizes: dict[str, Any] = {"max_steps": 2, "batch_size": 2, "num_generations": 4, "max_completion_length": 8}
    options: dict[str, Any] = {"reward_funcs": [lengths], "report_to": [], "device": "cpu", "temperature": 0.7}
    MRLTrainer(model=tiny_model, train_dataset=tasks, run_dir=str(tmp_path / "r"), **sizes, **options).train()
    with RunReader(tmp_path / "r") as reader:
        for step in (1, 2):
            rows = list(reader.rollouts(Filter(step=step)))
            trained = [row["samples"][0] for row in rows if row["advantage"]]
            assert trained
            assert all("trainer_gap" not in row["samples"][0] for row in rows if not row["advantage"])
            gaps = [abs(gap) for sample in trained for gap in sample["trainer_gap"]]
            assert len(gaps) == sum(len(sample["completion_ids"]) for sample in trained)
            assert sum(gaps) / len(gaps) == pytest.approx(reader.metrics(step)["train/logprob_gap"], rel=0.02, abs=1e-6)
            assert {row["policy_version"] for row in rows} == {step - 1}


def test_tokens_of_the_environment_have_none() -> None:
    samples = [Sample([1], [2, 3, 4], [-1.0, -9.0, -2.0], [1, 0, 1], 0), Sample([1], [2], [-1.0], [1], 0)]
    batch = TrainBatch(samples, [[0.5, 0.0, -0.5], 1.0], 2, 3)
    note_per_token(batch, [[-1.5, 0.0, -1.75], [-1.0]])
    found = decode_samples(encode_samples(samples))
    assert found[0]["trainer_gap"] == [-0.5, 0.0, 0.25]
    assert found[0]["advantages"] == [0.5, 0.0, -0.5]
    assert found[1]["trainer_gap"] == [0]
    assert "advantages" not in found[1]
    note_per_token(batch, [])  # nothing was trained
    with pytest.raises(ValueError, match="zip"):
        note_per_token(batch, [[0.0]])
