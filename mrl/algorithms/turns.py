"""Turns: which of a rollout's tokens belong to which step of its environment.

A turn is an unbroken run of sampled tokens (mask 1) in a sample; a sample's end ends it too. Step k's reward is turn
k's.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from mrl.types import Rollout


def turn_lengths(masks: Sequence[Sequence[int]]) -> list[int]:
    """Sampled tokens of each turn, over all samples in order."""
    return [sum(1 for _ in run) for mask in masks for sampled, run in groupby(mask) if sampled]


def turn_rewards(total: float, step_rewards: Sequence[float], turns: int) -> list[float]:
    """The reward of each turn: its step's, 0 where there was none, and at the last turn whatever `total` holds beyond
    the steps' sum. They add up to `total`. Raises ValueError when there are more steps than turns.
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
    """One value per sampled token of the rollout → one list per sample, as long as its completion; 0 where the mask is.

    Raises ValueError unless there is exactly one value per sampled token.
    """
    sampled = sum(sum(sample.mask) for sample in rollout.samples)
    if sampled != len(values):
        raise ValueError(f"{rollout.id}: {len(values)} advantages for {sampled} sampled tokens")
    remaining = iter(values)
    return [[next(remaining) if on else 0.0 for on in sample.mask] for sample in rollout.samples]
