"""What a sampler's logprobs give away, against the engines' own filters; and what importance weights are worth."""

from __future__ import annotations

import itertools

import pytest
import torch

from mrl.actor.step_metrics import StepMetrics
from mrl.algorithms.sampling_estimates import SamplingFilter, ScoredTokens, estimate_filter, estimate_temperature
from mrl.engines.transformers.sampling import RowParams, filter_logits, sample
from mrl.mismatch.correction import importance_weights, log_importance, unexplained_gap, weighed_once
from mrl.types import SamplingParams

TOKENS, WORDS = 200, 400


def drawn(temperature: float, sampling_filter: SamplingFilter, noise: float = 0.0) -> ScoredTokens:
    """Tokens drawn by the engines' sampler from random logits, with its logprobs."""
    rng = torch.Generator().manual_seed(7)
    logits = 2.5 * torch.randn(TOKENS, WORDS, generator=rng)
    params = SamplingParams(temperature, sampling_filter.top_p, sampling_filter.top_k, sampling_filter.min_p)
    rows = RowParams.build([params] * TOKENS, list(range(TOKENS)), torch.device("cpu"))
    ids, logprobs, _ = sample(logits, rows, torch.zeros(TOKENS, dtype=torch.long))
    return ScoredTokens(logits, ids, logprobs + noise * torch.randn(TOKENS, generator=rng))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.6])
@pytest.mark.parametrize(
    "sampling_filter",
    [
        SamplingFilter(),
        SamplingFilter(top_p=0.7),
        SamplingFilter(top_k=9),
        SamplingFilter(min_p=0.05),
        SamplingFilter(0.8, 40, 0.02),
    ],
    ids=repr,
)
def test_the_logprobs_are_those_the_engine_reports(temperature: float, sampling_filter: SamplingFilter) -> None:
    tokens = drawn(temperature, sampling_filter)
    torch.testing.assert_close(tokens.logprobs(temperature, sampling_filter), tokens.sampler_N, atol=1e-4, rtol=1e-4)
    assert tokens.gap(temperature, sampling_filter) < 1e-5
    plain = tokens.logprobs(temperature, SamplingFilter())
    assert (tokens.sampler_N - plain).max() <= sampling_filter.largest_gain + 1e-5
    assert unexplained_gap(plain, tokens.sampler_N, sampling_filter.largest_gain).max() < 1e-4


def test_what_a_filter_keeps_is_what_filter_logits_keeps() -> None:
    rng = torch.Generator().manual_seed(1)
    logits = 2 * torch.randn(50, 64, generator=rng)
    for top_p, top_k, min_p in itertools.product((1.0, 0.5, 0.05), (0, 1, 10), (0.0, 0.2)):
        rows = RowParams.build([SamplingParams(0.8, top_p, top_k, min_p)] * 50, [0] * 50, torch.device("cpu"))
        kept = filter_logits(logits, rows)
        likeliest = kept.argmax(dim=-1)
        expected = kept.log_softmax(dim=-1).gather(1, likeliest[:, None])[:, 0]
        got = ScoredTokens(logits, likeliest, expected).logprobs(0.8, SamplingFilter(top_p, top_k, min_p))
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("true", [0.3, 0.7, 0.95, 1.0, 1.3, 2.0])
@pytest.mark.parametrize("sampling_filter", [SamplingFilter(), SamplingFilter(top_p=0.9)], ids=repr)
def test_the_temperature_is_found(true: float, sampling_filter: SamplingFilter) -> None:
    found = estimate_temperature(drawn(true, sampling_filter, noise=0.01), 1.0, sampling_filter)
    assert found.value == pytest.approx(true, rel=0.01)
    assert found.residual < 0.012


def test_logprobs_from_before_temperature_and_filter_are_found() -> None:
    """What a server reports that is not told to report processed logprobs."""
    found = estimate_temperature(drawn(1.0, SamplingFilter()), 0.7, SamplingFilter(top_p=0.9))
    assert (found.name, found.value) == ("temperature", pytest.approx(1.0, rel=2e-3))
    assert found.residual < 5e-3


@pytest.mark.parametrize(
    ("asked", "used", "name", "value"),
    [
        (SamplingFilter(), SamplingFilter(top_p=0.9), "top_p", 0.9),
        (SamplingFilter(), SamplingFilter(top_p=0.33), "top_p", 0.33),
        (SamplingFilter(top_p=0.9), SamplingFilter(top_p=0.5), "top_p", 0.5),
        (SamplingFilter(), SamplingFilter(top_k=20), "top_k", 20),
        (SamplingFilter(top_p=0.95), SamplingFilter(top_k=5), "top_k", 5),
        (SamplingFilter(), SamplingFilter(min_p=0.1), "min_p", 0.1),
    ],
    ids=repr,
)
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_the_filter_is_found(
    asked: SamplingFilter, used: SamplingFilter, name: str, value: float, temperature: float
) -> None:
    tokens = drawn(temperature, used)
    found = estimate_filter(tokens, temperature, asked)
    assert (found.name, found.value) == (name, pytest.approx(value, rel=0.05))
    assert found.residual < 0.02
    assert estimate_temperature(tokens, temperature, asked).residual > 0.05 + 3 * found.residual, "so it is not named"


def test_a_temperature_is_no_filter_and_noise_is_neither() -> None:
    hot = drawn(0.7, SamplingFilter())
    assert estimate_filter(hot, 1.0, SamplingFilter()).residual > 0.35 * hot.gap(1.0, SamplingFilter())
    noisy = drawn(1.0, SamplingFilter(), noise=0.05)
    gap = noisy.gap(1.0, SamplingFilter())
    assert (
        min(
            estimate_filter(noisy, 1.0, SamplingFilter()).residual,
            estimate_temperature(noisy, 1.0, SamplingFilter()).residual,
        )
        > 0.9 * gap
    )


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


def test_only_what_lies_outside_the_filters_reach_is_unexplained() -> None:
    old = torch.full((1, 5), -1.0)
    sampler = torch.tensor([[-1.2, -1.0, -0.95, -0.9, -0.5]])
    found = unexplained_gap(old, sampler, SamplingFilter(top_p=0.9).largest_gain)
    torch.testing.assert_close(found, torch.tensor([[0.2, 0.0, 0.0, 0.0, 0.5 - 0.10536]]), atol=1e-5, rtol=0)
    torch.testing.assert_close(unexplained_gap(old, sampler, SamplingFilter().largest_gain), (sampler - old).abs())
    torch.testing.assert_close(
        unexplained_gap(old, sampler, SamplingFilter(top_k=3).largest_gain), torch.tensor([[0.2, 0.0, 0.0, 0.0, 0.0]])
    )
