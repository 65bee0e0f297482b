"""Group-relative advantages (GRPO) with a choice of scaling."""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.algorithms.advantages.base import (
    EPSILON,
    Advantage,
    AdvantageInputs,
    AdvantageSettings,
    Scale,
    check_finite,
    group_means,
    standard_deviation,
)


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
    check_finite(rewards_B)
    means_B, divisors_B = baseline_and_divisor(rewards_B, groups_B, scale)
    return (rewards_B - means_B) / divisors_B


def baseline_and_divisor(rewards_B: Tensor, groups_B: Tensor, scale: Scale) -> tuple[Tensor, Tensor]:
    """What `group_advantages` subtracts from each reward, and divides by; B each."""
    means_B, counts_B = group_means(rewards_B, groups_B)
    if scale == "none" or rewards_B.numel() == 0:
        return means_B, torch.ones_like(means_B)
    if scale == "batch":
        return means_B, (standard_deviation(rewards_B) + EPSILON).expand_as(means_B)
    mean_squares_B, _ = group_means((rewards_B - means_B) ** 2, groups_B)
    std_B = (mean_squares_B * counts_B / (counts_B - 1).clamp(min=1)).sqrt()
    return means_B, std_B + EPSILON


def zero_variance_fraction(rewards_B: Tensor, groups_B: Tensor) -> float:
    """Share of the groups whose rewards are all equal, and which therefore give no gradient."""
    if rewards_B.numel() == 0:
        return 0.0
    groups = groups_B.unique()
    return sum(bool((rewards_B[groups_B == g] == rewards_B[groups_B == g][0]).all()) for g in groups) / len(groups)


def _compute(inputs: AdvantageInputs, settings: AdvantageSettings) -> Tensor:
    return group_advantages(inputs.rewards_B, inputs.groups_B, settings.scale)


GROUP = Advantage(_compute, options=("scale_rewards", "discount"))
