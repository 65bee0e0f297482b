"""What importance weights are worth, by the formulas and over micro-batches."""

from __future__ import annotations

import pytest
import torch

from mrl.actor.step_metrics import StepMetrics
from mrl.mismatch.correction import importance_weights, log_importance, weighed_once


@pytest.mark.parametrize("correction", ["none", "truncated", "masked", "sequence_truncated", "sequence_masked"])
def test_sample_size_and_dropped_weight_are_those_of_the_formulas(correction: str) -> None:
    rng = torch.Generator().manual_seed(2)
    old, sampler = -torch.rand(6, 9, generator=rng), -torch.rand(6, 9, generator=rng)
    mask = (torch.rand(6, 9, generator=rng) < 0.7).float()
    mask[3] = 0
    raw = torch.exp(torch.where(mask > 0, (old - sampler).double(), 0.0))
    weights = raw.prod(dim=1)[mask.any(dim=1)] if correction.startswith("sequence") else raw[mask > 0]
    if correction.endswith("truncated"):
        left = weights.clamp(0.9, 1.2)
    else:
        left = torch.where((weights > 1.2) | (weights < 0.9), 0.0, weights)

    metrics = StepMetrics()
    for rows in (slice(0, 2), slice(2, 6)):  # in micro-batches
        part = old[rows], sampler[rows], mask[rows]
        once = weighed_once(mask[rows], correction)  # type: ignore[arg-type]
        bounded = importance_weights(*part, correction, 1.2, 0.9)  # type: ignore[arg-type]
        log_weights = log_importance(*part, correction)  # type: ignore[arg-type]
        metrics.importance(log_weights, None if correction == "none" else bounded, once)
    found = metrics.weights.summary(metrics.weights.sums)
    expected = weights.sum() ** 2 / (weights**2).sum() / len(weights)
    assert found["train/effective_sample_fraction"] == pytest.approx(expected.item(), rel=1e-5)
    if correction == "none":
        assert "train/importance_dropped_fraction" not in found
    else:
        dropped = (weights - left).clamp(min=0).sum() / weights.sum()
        assert found["train/importance_dropped_fraction"] == pytest.approx(dropped.item(), abs=1e-5)


def test_a_weight_beyond_any_float_is_counted_for_what_it_is() -> None:
    metrics = StepMetrics()
    metrics.importance(torch.tensor([0.0, 2000.0, 0.0, 0.0]), torch.tensor([1.0, 2.0, 1.0, 1.0]))
    assert metrics.weights.summary(metrics.weights.sums) == {
        "train/effective_sample_fraction": pytest.approx(0.25),
        "train/importance_dropped_fraction": pytest.approx(1.0),
    }
