"""The interface of an advantage: a function from a step's rewards to a number per rollout, or per sampled token.

Shapes: B scored rollouts of all groups together, K reward functions. All in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

Scale = Literal["group", "batch", "none"]

EPSILON = 1e-4
"""Added to the standard deviation, as in TRL, so that near-equal rewards are not blown up."""


@dataclass(frozen=True)
class AdvantageInputs:
    """The inputs of every advantage."""

    rewards_B: Tensor
    """Each rollout's reward, shaping (length, KL) included; discounted, if the advantage has the option `discount`."""
    groups_B: Tensor
    """The group each rollout belongs to, integers from 0. Groups may differ in size: rollouts that could not be scored
    are left out."""
    rewards_BK: Tensor
    """By reward function, NaN where one does not apply; shaping, if any, is the last column."""
    weights_K: Tensor
    """`reward_weights`."""
    turn_rewards: list[list[float]] = field(default_factory=list)
    """Per rollout, the rewards of its turns, which add up to its reward; only for advantages that read `steps`."""
    turn_lengths: list[list[int]] = field(default_factory=list)
    """Sampled tokens of each of those turns."""


@dataclass(frozen=True)
class AdvantageSettings:
    """The advantages' knobs; each reads its own."""

    scale: Scale = "group"
    normalize: bool = False
    discount: float = 1.0


Compute = Callable[[AdvantageInputs, AdvantageSettings], Tensor | list[Tensor]]
"""One number per rollout, or for each rollout one per sampled token. Raises ValueError for rewards it cannot take."""


@dataclass(frozen=True)
class Advantage:
    """One member of `ADVANTAGES`."""

    compute: Compute
    reads: Literal["reward", "rewards", "steps"] = "reward"
    """What must differ within a group for a gradient: the total reward, a reward function's, or a step's."""
    options: tuple[str, ...] = ()
    """Options of `AlgorithmConfig` it reads. Setting one that it does not read is refused."""
    takes_negative: bool = True
    """Rewards may be negative. If False, shaping, which can make them negative, is refused."""


def standard_deviation(values_N: Tensor) -> Tensor:
    """Sample standard deviation (n - 1), 0 for one value."""
    centred_N = values_N - values_N.mean()
    return (centred_N.pow(2).sum() / max(values_N.numel() - 1, 1)).sqrt()


def standardize(values_N: Tensor) -> Tensor:
    """Mean 0 and standard deviation 1; zeros where there is one value."""
    if values_N.numel() == 0:
        return values_N
    return (values_N - values_N.mean()) / (standard_deviation(values_N) + EPSILON)


def group_means(values_N: Tensor, groups_N: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and size of each value's group; N each."""
    if values_N.numel() == 0:
        return values_N, values_N
    counts_G = torch.bincount(groups_N).to(values_N)
    means_G = torch.zeros_like(counts_G).index_add_(0, groups_N, values_N) / counts_G.clamp(min=1)
    # Rounding may move the mean of equal values off them; clamped to their range it is exact, and advantages are 0.
    least_G = torch.zeros_like(counts_G).scatter_reduce_(0, groups_N, values_N, "amin", include_self=False)
    most_G = torch.zeros_like(counts_G).scatter_reduce_(0, groups_N, values_N, "amax", include_self=False)
    return means_G.clamp(least_G, most_G)[groups_N], counts_G[groups_N]


def check_finite(rewards_B: Tensor) -> None:
    """Raises ValueError."""
    if not torch.isfinite(rewards_B).all():
        raise ValueError("rewards must be finite")
