"""Importance weights and the gap that a filter does not explain, by hand."""

from __future__ import annotations

import torch

from mrl.algorithms.sampling_estimates import SamplingFilter
from mrl.mismatch.correction import importance_weights, unexplained_gap


def test_weights_are_bounded_as_asked() -> None:
    old = torch.log(torch.tensor([[0.5, 0.9, 0.2, 0.1]]))
    sampler = torch.log(torch.tensor([[0.25, 0.9, 0.05, 0.4]]))
    mask = torch.tensor([[1, 1, 1, 0]])
    for correction, expected in (
        ("none", [1.0, 1.0, 1.0, 1.0]),
        ("truncated", [2.0, 1.0, 3.0, 1.0]),
        ("masked", [2.0, 1.0, 0.0, 1.0]),
    ):
        got = importance_weights(old, sampler, mask, correction, cap=3.0)
        torch.testing.assert_close(got, torch.tensor([expected]), atol=1e-5, rtol=1e-5)


def test_only_what_lies_outside_the_filters_reach_is_unexplained() -> None:
    old = torch.full((1, 5), -1.0)
    sampler = torch.tensor([[-1.2, -1.0, -0.95, -0.9, -0.5]])
    found = unexplained_gap(old, sampler, SamplingFilter(top_p=0.9).largest_gain)
    torch.testing.assert_close(found, torch.tensor([[0.2, 0.0, 0.0, 0.0, 0.5 - 0.10536]]), atol=1e-5, rtol=0)
    torch.testing.assert_close(unexplained_gap(old, sampler, SamplingFilter().largest_gain), (sampler - old).abs())
    torch.testing.assert_close(
        unexplained_gap(old, sampler, SamplingFilter(top_k=3).largest_gain), torch.tensor([[0.2, 0.0, 0.0, 0.0, 0.0]])
    )
