"""Filters, random numbers and the draw, each against an independent reference in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.engines.transformers import sampling
from mrl.engines.transformers.sampling import RowParams, draw, filter_logits, sample, uniforms
from mrl.types import SamplingParams
from tests.sampling_reference import reference_probs, sampling_params

CPU = torch.device("cpu")


def splitmix(seed: int, position: int) -> float:
    mask = (1 << 64) - 1

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    return ((mix((mix(seed) + 0x9E3779B97F4A7C15 * (position + 1)) & mask) >> 12) + 0.5) / 2**52


@settings(max_examples=60, deadline=None)
@given(st.lists(sampling_params, min_size=1, max_size=5), st.integers(1, 300), st.integers(0, 2**31))
def test_filtered_distribution_agrees_with_the_reference(rows, vocab_size, seed):
    logits = np.random.default_rng(seed).normal(0, 3, (len(rows), vocab_size)).astype(np.float32)
    params = RowParams.build(rows, [0] * len(rows), CPU)
    got = torch.softmax(filter_logits(torch.from_numpy(logits), params).double(), dim=-1).numpy()
    for row, p in enumerate(rows):
        np.testing.assert_allclose(got[row], reference_probs(logits[row], p), atol=2e-5)


def test_top_k_keeps_ties_with_the_kth_token():
    params = RowParams.build([SamplingParams(top_k=2)], [0], CPU)
    assert torch.isfinite(filter_logits(torch.tensor([[3.0, 1.0, 1.0, 0.0]]), params)).tolist() == [
        [True] * 3 + [False]
    ]


def test_rows_without_filters_are_left_alone_beside_rows_with_them():
    logits = torch.randn(3, 40)
    rows = [SamplingParams(), SamplingParams(top_k=1, top_p=0.5, min_p=0.5, temperature=0.5), SamplingParams()]
    filtered = filter_logits(logits, RowParams.build(rows, [1, 2, 3], CPU))
    assert torch.equal(filtered[[0, 2]], logits[[0, 2]])


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**63 - 1), st.integers(0, 2**20))
def test_uniforms_are_splitmix64_inside_the_open_interval(seed, position):
    u = uniforms(torch.tensor([seed]), torch.tensor([position])).item()
    assert u == splitmix(seed, position)
    assert 0 < u < 1


def test_uniforms_of_neighbouring_seeds_and_positions_are_uniform_and_unrelated():
    u = torch.stack([uniforms(torch.arange(400), torch.tensor(position)) for position in range(100)]).numpy()
    counts = np.histogram(u, bins=20, range=(0, 1))[0]
    assert ((counts - 2000) ** 2 / 2000).sum() < 43.8  # chi-square, 19 degrees of freedom, p = 0.001
    assert abs(np.corrcoef(u[:-1].ravel(), u[1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(u[:, :-1].ravel(), u[:, 1:].ravel())[0, 1]) < 0.02


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 700), st.integers(0, 2**31), st.integers(1, 6))
def test_draw_is_the_inverse_of_the_cumulated_distribution(vocab_size, seed, batch):
    rng = np.random.default_rng(seed)
    weights = (rng.random((batch, vocab_size)) * (rng.random((batch, vocab_size)) < 0.3)).astype(np.float32)
    weights[:, rng.integers(vocab_size)] = 0.5
    u = rng.random(batch)
    token, usable = draw(torch.from_numpy(weights), torch.from_numpy(u))
    assert usable.all()
    for row in range(batch):
        cdf = weights[row].astype(np.float64).cumsum()
        expected = int(np.searchsorted(cdf, u[row] * cdf[-1], side="right"))
        assert weights[row, token[row]] > 0
        # Next to a boundary float32 chunk sums may fall on the other side.
        assert token[row] == expected or abs(cdf / cdf[-1] - u[row]).min() < 1e-6


@pytest.mark.parametrize("u", [2.0**-53, 0.5, 1 - 2.0**-53])
def test_draw_never_takes_a_token_of_probability_zero(u):
    for vocab_size in (1, 127, 128, 129, 400):
        for position in {0, vocab_size // 2, vocab_size - 1}:
            weights = torch.zeros(1, vocab_size)
            weights[0, position] = 1e-30
            assert draw(weights, torch.tensor([u], dtype=torch.float64))[0].item() == position


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(top_p=0.8),
        SamplingParams(top_k=4),
        SamplingParams(min_p=0.15),
        SamplingParams(temperature=1.3, top_p=0.9, top_k=9, min_p=0.05),
    ],
    ids=["plain", "temperature", "top_p", "top_k", "min_p", "all"],
)
def test_sampled_frequencies_match_the_distribution(params):
    n, vocab_size = 40_000, 12
    logits = np.random.default_rng(5).normal(0, 1.5, vocab_size).astype(np.float32)
    expected = reference_probs(logits, params)
    rows = RowParams.build([params] * n, range(n), CPU)
    ids, logprobs, _ = sample(torch.from_numpy(logits).expand(n, -1), rows, torch.full((n,), 3))
    counts = np.bincount(ids.numpy(), minlength=vocab_size)
    assert counts[expected == 0].sum() == 0
    live = expected > 0
    chi_square = ((counts[live] - n * expected[live]) ** 2 / (n * expected[live])).sum()
    assert chi_square < 31.3  # p = 0.001 at 11 degrees of freedom, the most there can be
    np.testing.assert_allclose(logprobs.numpy(), np.log(expected[ids.numpy()]), atol=1e-5)


def test_greedy_rows_take_the_most_likely_token_with_logprob_zero():
    logits = torch.randn(4, 50)
    rows = [SamplingParams(temperature=0), SamplingParams(), SamplingParams(temperature=0), SamplingParams()]
    ids, logprobs, _ = sample(logits, RowParams.build(rows, [1, 2, 3, 4], CPU), torch.zeros(4, dtype=torch.int64))
    assert torch.equal(ids[[0, 2]], logits[[0, 2]].argmax(-1))
    assert logprobs[[0, 2]].tolist() == [0.0, 0.0]
    assert (logprobs[[1, 3]] < 0).all()


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_reported_for_their_row(poison):
    logits = torch.randn(3, 300)
    logits[1, 17] = poison
    for params in (SamplingParams(), SamplingParams(top_p=0.9), SamplingParams(temperature=0)):
        usable = sample(logits, RowParams.build([params] * 3, [1, 2, 3], CPU), torch.zeros(3, dtype=torch.int64))[2]
        assert usable.tolist() == [True, False, True]
    logits[1, 17] = -float("inf")  # a model may rule out a token itself
    assert sample(logits, RowParams.build([SamplingParams()] * 3, [1, 2, 3], CPU), torch.zeros(3, dtype=torch.int64))[
        2
    ].all()


def test_slices_of_rows_give_the_same_tokens(monkeypatch):
    logits = torch.randn(11, 100)
    params = RowParams.build([SamplingParams(top_k=i) for i in range(11)], range(11), CPU)
    whole = sample(logits, params, torch.full((len(logits),), 2))
    monkeypatch.setattr(sampling, "_MAX_DRAW_ELEMENTS", 400)
    for a, b in zip(whole, sample(logits, params, torch.full((len(logits),), 2)), strict=True):
        assert torch.equal(a, b)
