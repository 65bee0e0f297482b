"""What a sampler's logprobs give away, against the engines' own sampler and a reference in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.algorithms.sampling_estimates import SamplingFilter, ScoredTokens, estimate_filter, estimate_temperature
from mrl.engines.transformers.sampling import RowParams, sample
from mrl.mismatch.correction import unexplained_gap
from mrl.types import SamplingParams
from tests.sampling_reference import reference_probs, sampling_params

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


@settings(max_examples=60, deadline=None)
@given(sampling_params, st.integers(1, 300), st.integers(0, 2**31))
def test_the_logprobs_agree_with_the_reference(params: SamplingParams, vocab_size: int, seed: int) -> None:
    logits = np.random.default_rng(seed).normal(0, 3, vocab_size).astype(np.float32)
    expected = reference_probs(logits, params)
    kept = expected.nonzero()[0]
    logits_NV = torch.from_numpy(logits).expand(len(kept), -1)
    tokens = ScoredTokens(logits_NV, torch.from_numpy(kept), torch.zeros(len(kept)))
    got = tokens.logprobs(params.temperature, SamplingFilter(params.top_p, params.top_k, params.min_p))
    np.testing.assert_allclose(got.numpy(), np.log(expected[kept]), atol=1e-4, rtol=1e-4)


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
