"""Advantages against numpy, group by group."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrl.algorithms.advantages import EPSILON, group_advantages, zero_variance_fraction

grouped = st.lists(
    st.tuples(st.integers(0, 4), st.floats(-5, 5, allow_nan=False)), min_size=1, max_size=30
)  # (group, reward), in any order


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@given(rows=grouped)
def test_matches_numpy(scale: str, rows: list[tuple[int, float]]) -> None:
    groups, rewards = np.array([g for g, _ in rows]), np.array([r for _, r in rows])
    expected = np.empty_like(rewards)
    for i, group in enumerate(groups):
        own = rewards[groups == group]
        expected[i] = rewards[i] - own.mean()
        if scale == "group":
            expected[i] /= (own.std(ddof=1) if len(own) > 1 else 0.0) + EPSILON
        elif scale == "batch":
            expected[i] /= (rewards.std(ddof=1) if len(rewards) > 1 else 0.0) + EPSILON
    got = group_advantages(torch.tensor(rewards), torch.tensor(groups), scale)
    np.testing.assert_allclose(got.numpy(), expected, atol=1e-6, rtol=1e-6)


@given(rows=grouped)
def test_every_group_has_mean_zero_without_scaling_too(rows: list[tuple[int, float]]) -> None:
    groups, rewards = torch.tensor([g for g, _ in rows]), torch.tensor([r for _, r in rows], dtype=torch.float64)
    advantages = group_advantages(rewards, groups, "none")
    for group in groups.unique():
        assert advantages[groups == group].mean().abs() < 1e-9


def test_a_group_of_one_and_a_group_of_equals_teach_nothing() -> None:
    rewards, groups = torch.tensor([3.0, 1.0, 1.0]), torch.tensor([0, 1, 1])
    for scale in ("group", "batch", "none"):
        assert group_advantages(rewards, groups, scale).tolist() == [0, 0, 0]
    assert zero_variance_fraction(rewards, groups) == 1.0


def test_zero_variance_fraction_counts_groups() -> None:
    assert zero_variance_fraction(torch.tensor([1.0, 1, 0, 1]), torch.tensor([0, 0, 1, 1])) == 0.5


def test_rewards_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        group_advantages(torch.tensor([1.0, float("nan")]), torch.tensor([0, 0]), "group")
    with pytest.raises(ValueError, match="one length"):
        group_advantages(torch.tensor([1.0]), torch.tensor([0, 0]), "group")
