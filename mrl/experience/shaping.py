"""What is added to rewards before advantages are taken, and which groups teach anything."""

from __future__ import annotations

from typing import Literal

from mrl.algorithms.shaping import length_rewards, soft_overlong_punishment
from mrl.config import OrchestratorConfig
from mrl.experience.stats import PASS
from mrl.types import Group, Rollout

OVERLONG, LENGTH, KL = "shaping/overlong", "shaping/length", "shaping/kl"
"""Terms in `Rollout.metrics`, where they are recorded beside the reward, which stays what the functions gave."""


def is_scored(rollout: Rollout) -> bool:
    """Whether it was generated and has a reward."""
    return rollout.status == "ok" and rollout.reward is not None and bool(rollout.samples)


def shaped_reward(rollout: Rollout) -> float:
    """A scored rollout's reward and everything that was added to it."""
    assert rollout.reward is not None
    return rollout.reward + shaping(rollout)


def shaping(rollout: Rollout) -> float:
    """What was added to the reward."""
    return sum(rollout.metrics.get(term, 0.0) for term in (OVERLONG, LENGTH, KL))


def shape_by_length(groups: list[Group], config: OrchestratorConfig) -> None:
    """Note the length terms that are configured on every scored rollout."""
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


def teaches(group: Group, reads: Literal["reward", "rewards", "steps"] = "reward") -> bool:
    """Whether the group's scored rollouts differ in what the advantage reads, before shaping."""
    seen = set()
    for rollout in group.rollouts:
        if is_scored(rollout):
            parts = {"reward": (), "rewards": tuple(rollout.rewards.items()), "steps": tuple(rollout.step_rewards)}
            seen.add((rollout.reward, parts[reads]))
    return len(seen) > 1
