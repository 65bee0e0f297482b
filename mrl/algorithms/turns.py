"""Turns: which of a rollout's tokens belong to which step of its environment.

A turn is a maximal run of sampled tokens (mask 1) within one sample. Turn k's reward is that of environment step k.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from mrl.types import Rollout


def turn_lengths(masks: Sequence[Sequence[int]]) -> list[int]:
    """Sampled tokens of each turn, over all samples in order."""
    return [sum(1 for _ in run) for mask in masks for sampled, run in groupby(mask) if sampled]


def turn_rewards(total: float, step_rewards: Sequence[float], turns: int) -> list[float]:
    """The reward of each turn: its step's, or 0 without one. The last turn also gets the difference between `total` and
    the steps' sum, so they add up to `total`. Raises ValueError when there are more steps than turns.
    """
    if len(step_rewards) > turns:
        raise ValueError(f"{len(step_rewards)} step rewards for {turns} turns of sampled tokens")
    rewards = [*step_rewards, *[0.0] * (turns - len(step_rewards))]
    if rewards:
        rewards[-1] += total - sum(step_rewards)
    return rewards


def returns_to_go(rewards: Sequence[float], discount: float) -> list[float]:
    """G_k = Σ_{j ≥ k} discount^(j-k) r_j."""
    returns: list[float] = []
    following = 0.0
    for reward in reversed(rewards):
        following = reward + discount * following
        returns.append(following)
    return returns[::-1]


def spread_over_samples(values: Sequence[float], rollout: Rollout) -> list[list[float]]:
    """One value per sampled token of the rollout → one list per sample, as long as its completion; 0 where mask is 0.

    Raises ValueError unless there is exactly one value per sampled token.
    """
    sampled = sum(sum(sample.mask) for sample in rollout.samples)
    if sampled != len(values):
        raise ValueError(f"{rollout.id}: {len(values)} advantages for {sampled} sampled tokens")
    remaining = iter(values)
    return [[next(remaining) if on else 0.0 for on in sample.mask] for sample in rollout.samples]
