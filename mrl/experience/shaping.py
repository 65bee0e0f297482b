"""What is added to rewards before advantages are taken: terms for length, and for leaving the reference model.

A term is noted in `Rollout.metrics`, beside the reward, which stays what the reward functions gave.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable

from mrl.algorithms.shaping import length_rewards, soft_overlong_punishment
from mrl.config import OrchestratorConfig
from mrl.experience.groups import PASS, is_scored, kept_groups
from mrl.types import Group, Rollout, Sample

OVERLONG, LENGTH, KL = TERMS = ("shaping/overlong", "shaping/length", "shaping/kl")

AskKL = Callable[[list[Sample]], Awaitable[list[float]]]
"""Gives the KL of each sample to the reference model, in nats."""


async def shape(groups: list[Group], config: OrchestratorConfig, reference_kl: AskKL) -> None:
    """Note every term that is configured, on the rollouts that have a reward. The one place where rewards are shaped.

    A rollout whose divergence from the reference model is not finite is marked failed.
    """
    algorithm = config.algorithm
    if algorithm.soft_punish_cache or algorithm.length_penalty:
        _shape_by_length(groups, config)
    if algorithm.beta and algorithm.kl_in == "reward":
        scored = [r for group in kept_groups(groups, config) for r in group.rollouts if is_scored(r)]
        kl = await reference_kl([sample for rollout in scored for sample in rollout.samples])
        _shape_by_kl(scored, kl, algorithm.beta)


def shaped_reward(rollout: Rollout) -> float:
    """A scored rollout's reward and everything that was added to it."""
    assert rollout.reward is not None
    return rollout.reward + shaping(rollout)


def shaping(rollout: Rollout) -> float:
    """What was added to the reward."""
    return sum(rollout.metrics.get(term, 0.0) for term in TERMS)


def _shape_by_length(groups: list[Group], config: OrchestratorConfig) -> None:
    algorithm = config.algorithm
    for group in groups:
        rollouts = [rollout for rollout in group.rollouts if is_scored(rollout)]
        if algorithm.soft_punish_cache:
            for rollout in rollouts:
                longest = max(len(sample.completion_ids) for sample in rollout.samples)
                punishment = soft_overlong_punishment(
                    longest, algorithm.max_completion_length, algorithm.soft_punish_cache
                )
                rollout.metrics[OVERLONG] = algorithm.overlong_penalty * punishment
        if algorithm.length_penalty:
            lengths = [sum(sum(sample.mask) for sample in rollout.samples) for rollout in rollouts]
            correct = [rollout.reward is not None and rollout.reward >= PASS for rollout in rollouts]
            for rollout, score in zip(rollouts, length_rewards(lengths, correct), strict=True):
                rollout.metrics[LENGTH] = algorithm.length_penalty * score


def _shape_by_kl(rollouts: list[Rollout], kl_by_sample: list[float], beta: float) -> None:
    values = iter(kl_by_sample)
    for rollout in rollouts:
        rollout.metrics[KL] = -beta * sum(next(values) for _ in rollout.samples)
        if not math.isfinite(rollout.metrics[KL]):
            rollout.fail("its divergence from the reference model (kl_in: reward) is not finite")
