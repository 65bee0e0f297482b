"""Advantages: how much better a rollout did than the others of its task."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Scale = Literal["group", "batch", "none"]

EPSILON = 1e-4
"""Added to the standard deviation, as in TRL, so that near-equal rewards are not blown up."""


def group_advantages(rewards_B: Tensor, groups_B: Tensor, scale: Scale) -> Tensor:
    """Advantage of each rollout relative to its group (GRPO, arXiv 2402.03300, section 4.1.2).

    rewards_B: one scalar per rollout. groups_B: the group each belongs to, integers in [0, number of groups); groups
    may differ in size (rollouts that could not be scored are left out) and need not be adjacent. Returns B values, with
    mean zero in each group, divided by

    - `group`: the group's standard deviation (sample, n - 1);
    - `batch`: the standard deviation of the batch's rewards (arXiv 2508.08221);
    - `none`: nothing (Dr. GRPO, arXiv 2503.20783).

    A group of one, or one whose rewards are all equal, has advantage 0. Raises ValueError on rewards that are not
    finite.
    """
    if rewards_B.shape != groups_B.shape or rewards_B.dim() != 1:
        raise ValueError(
            f"rewards and groups must be two lists of one length, got {rewards_B.shape} and {groups_B.shape}"
        )
    if not torch.isfinite(rewards_B).all():
        raise ValueError("rewards must be finite")
    if rewards_B.numel() == 0:
        return rewards_B.clone()
    counts_G = torch.bincount(groups_B).to(rewards_B)
    means_G = torch.zeros_like(counts_G).index_add_(0, groups_B, rewards_B) / counts_G.clamp(min=1)
    centred_B = rewards_B - means_G[groups_B]
    if scale == "none":
        return centred_B
    if scale == "batch":
        return centred_B / (_std(rewards_B - rewards_B.mean(), rewards_B.numel()) + EPSILON)
    squares_G = torch.zeros_like(counts_G).index_add_(0, groups_B, centred_B**2)
    std_G = (squares_G / (counts_G - 1).clamp(min=1)).sqrt()
    return centred_B / (std_G[groups_B] + EPSILON)


def zero_variance_fraction(rewards_B: Tensor, groups_B: Tensor) -> float:
    """Share of the groups whose rewards are all equal, and which therefore teach nothing."""
    if rewards_B.numel() == 0:
        return 0.0
    groups = groups_B.unique()
    return sum(bool((rewards_B[groups_B == g] == rewards_B[groups_B == g][0]).all()) for g in groups) / len(groups)


def _std(centred_B: Tensor, count: int) -> Tensor:
    return (centred_B.pow(2).sum() / max(count - 1, 1)).sqrt()
