"""The objective through the actor: a model's gradient is the same however a batch is split, for every loss."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from mrl.actor.worker import ActorWorker
from mrl.algorithms import LOSSES
from mrl.types import Sample, TrainBatch
from tests.soak import rows_but

AROUND: dict[str, dict[str, Any]] = {
    "alone": {},
    "kl": {"beta": 0.1, "kl_estimator": "k2"},
    "entropy": {"entropy_coef": 0.1, "top_entropy_quantile": 0.3},
    "masked": {"importance_sampling": "masked", "importance_sampling_floor": 0.9},
}


def make_batch(*, by_token: bool = False) -> TrainBatch:
    """Ragged samples; the sampler's logprobs are a little beside what a tiny random model says."""
    rng = torch.Generator().manual_seed(3)
    samples: list[Sample] = []
    for row in range(7):
        length = int(torch.randint(1, 12, (1,), generator=rng))
        completion = torch.randint(0, 200, (length,), generator=rng).tolist()
        logprobs = (-math.log(260) + 0.2 * torch.randn(length, generator=rng)).tolist()
        samples.append(Sample([1, 2, row // 3], completion, logprobs, [1] * length, policy_version=0))
    advantages: list[float | list[float]] = torch.randn(7, generator=rng).tolist()
    if by_token:
        advantages[:4] = [torch.randn(len(s.completion_ids), generator=rng).tolist() for s in samples[:4]]
    return TrainBatch(samples, advantages, 9, 60)


def step(model: str, batch: TrainBatch, parts: int, **algorithm: Any) -> tuple[list[torch.Tensor], dict[str, float]]:
    training = {"gradient_accumulation_steps": parts, "max_grad_norm": 1e9}
    actor = ActorWorker({"model": model, "device": "cpu"}, training, 10, algorithm)
    actor.initialize()
    metrics = actor.train_step(batch)
    return [10 * state["exp_avg"] for state in actor.optimizer.state.values()], metrics


PAIRS = [(name, around) for name in LOSSES.names() for around in AROUND]
IN_SHORT = [(name, list(AROUND)[number % len(AROUND)]) for number, name in enumerate(LOSSES.names())]


@pytest.mark.parametrize(("name", "around"), rows_but(IN_SHORT, PAIRS))
def test_the_gradient_does_not_depend_on_the_split(tiny_model: str, name: str, around: str) -> None:
    batch = make_batch(by_token=around == "alone")
    whole, metrics = step(tiny_model, batch, 1, loss_type=name, **AROUND[around])
    assert metrics["train/grad_norm"] > 0
    for parts in (3, 7):
        other, numbers = step(tiny_model, batch, parts, loss_type=name, **AROUND[around])
        for mine, first in zip(other, whole, strict=True):
            torch.testing.assert_close(mine, first, atol=1e-5, rtol=1e-3)
        for metric, value in metrics.items():
            assert numbers[metric] == pytest.approx(value, abs=1e-4, rel=1e-3), metric


def test_an_advantage_by_token_is_that_tokens_alone(tiny_model: str) -> None:
    """The same number for every token is the number for the sample; 0 takes a token's gradient away."""
    batch = make_batch()
    spread = make_batch()
    spread.advantages = [[a] * len(s.completion_ids) for a, s in zip(batch.advantages, batch.samples, strict=True)]
    plain, _ = step(tiny_model, batch, 2, loss_type="dapo")
    by_token, _ = step(tiny_model, spread, 2, loss_type="dapo")
    for mine, first in zip(by_token, plain, strict=True):
        assert torch.equal(mine, first)
    one, two = make_batch(), make_batch()
    one.advantages = [[1.0] + [0.0] * (len(s.completion_ids) - 1) for s in one.samples]
    two.advantages = [[0.0] + [1.0] * (len(s.completion_ids) - 1) for s in two.samples]
    batch.advantages = [1.0] * 7
    parts = [step(tiny_model, b, 1, loss_type="dapo")[0] for b in (one, two, batch)]
    for first, rest, together in zip(*parts, strict=True):
        torch.testing.assert_close(first + rest, together, atol=1e-6, rtol=1e-4)
