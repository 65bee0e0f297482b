"""The actor on a simulated accelerator: the CPU's numbers, and few waits. Run by tests/test_simulated_device.py."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from mrl.actor.worker import ActorWorker
from mrl.config import AlgorithmConfig
from mrl.types import TrainBatch
from tests import simulated_device
from tests.actor.test_worker import make_batch

LORA = {"use_lora": True, "lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.0}
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "reference": {"beta": 0.1},
    "lora and reference": {**LORA, "beta": 0.1, "num_iterations": 2},
    "iterations": {"num_iterations": 2, "importance_sampling": "sequence_masked"},
    "offload": {"offload_optimizer": True},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "lora, checkpointing": {**LORA, "gradient_checkpointing": True},
    "padded": {"packing": False},
    "entropies": {"top_entropy_quantile": 0.5, "entropy_coef": 0.01},
    "bfloat16": {"dtype": "bfloat16"},
}


def make_actor(model: str, device: str, **options: Any) -> ActorWorker:
    def of(fields: Any) -> dict[str, Any]:
        return {name: value for name, value in options.items() if name in fields}

    algorithm = of(AlgorithmConfig.model_fields)
    settings = {"model": model, "device": device} | of({*LORA, "dtype"})
    training = {n: v for n, v in options.items() if n not in algorithm and n not in settings}
    if device == "cpu":
        training.pop("offload_optimizer", None)
    actor = ActorWorker(settings, {"learning_rate": 1e-3, **training}, total_steps=10, algorithm=algorithm)
    actor.initialize()
    return actor


def numbers(actor: ActorWorker) -> dict[str, torch.Tensor]:
    return {name: p.detach().cpu() for name, p in actor.model.named_parameters() if p.requires_grad}


@pytest.fixture(scope="module")
def batch(tiny_model: str) -> TrainBatch:
    return make_batch(tiny_model, rows=6)


@pytest.mark.parametrize("kind", KINDS)
def test_two_steps_are_those_of_the_cpu(kind: str, tiny_model: str, batch: TrainBatch, tmp_path: Path) -> None:
    """And the second, by another actor from a checkpoint, is bit for bit the same."""
    options = {"gradient_accumulation_steps": 2, **KINDS[kind]}
    here, there = make_actor(tiny_model, "cpu", **options), make_actor(tiny_model, "sim", **options)
    assert {p.device.type for p in there.model.parameters()} == {"sim"}
    coarse = 2e-2 if kind == "bfloat16" else 1e-4
    assert there.train_step(batch) == pytest.approx(here.train_step(batch), abs=coarse, rel=coarse)
    there.save_checkpoint(str(tmp_path / "checkpoint"), {})
    if options.get("beta"):
        values = [actor.reference_logprobs(batch.samples, 0.8) for actor in (here, there)]
        assert list(chain(*values[1])) == pytest.approx(list(chain(*values[0])), abs=1e-4)
        kl = [actor.reference_kl(batch.samples, 0.8) for actor in (here, there)]
        assert kl[1] == pytest.approx(kl[0], abs=1e-4)
    got = there.train_step(batch)
    assert got == pytest.approx(here.train_step(batch), abs=coarse, rel=coarse)
    for name, value in numbers(here).items():
        torch.testing.assert_close(numbers(there)[name], value, atol=coarse, rtol=coarse)
    resumed = make_actor(tiny_model, "sim", **options)
    resumed.load_checkpoint(str(tmp_path / "checkpoint"))
    assert resumed.train_step(batch) == got
    for name, value in numbers(there).items():
        assert torch.equal(numbers(resumed)[name], value)


@pytest.mark.parametrize("kind", ["full", "lora and reference", "iterations"])
def test_the_waits_of_a_step_do_not_depend_on_the_micro_batches(kind: str, tiny_model: str, batch: TrainBatch) -> None:
    """One for each update, and one for the step's metrics. (Padded rows cost one more each: to make their mask,
    transformers looks whether they are packed.)"""
    counts = []
    for parts in (1, 5):
        actor = make_actor(tiny_model, "sim", **KINDS[kind], gradient_accumulation_steps=parts)
        actor.train_step(batch)
        with simulated_device.waits() as found:
            actor.train_step(batch)
        counts.append(found.total())
    assert counts[0] == counts[1] <= 1 + KINDS[kind].get("num_iterations", 1), (counts, found)
    assert found
