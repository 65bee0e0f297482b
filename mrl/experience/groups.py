"""Which rollouts, samples and groups a step learns from."""

from __future__ import annotations

from typing import Literal

from mrl.algorithms import ADVANTAGES
from mrl.algorithms.turns import turn_lengths
from mrl.config import OrchestratorConfig
from mrl.types import Group, Rollout

Reads = Literal["reward", "rewards", "steps"]
"""What an advantage looks at: the joined reward, the reward of each function as well, or the reward of each step."""

PASS = 1.0
"""A rollout passes when its reward reaches this: rewards are meant to lie in [0, 1]."""


def is_scored(rollout: Rollout) -> bool:
    """Whether it was generated and has a reward."""
    return rollout.status == "ok" and rollout.reward is not None and bool(rollout.samples)


def is_overlong(rollout: Rollout, config: OrchestratorConfig) -> bool:
    """Whether the policy sampled more tokens than are trained on."""
    return rollout.num_tokens > config.algorithm.max_completion_length


def is_trainable(rollout: Rollout, config: OrchestratorConfig) -> bool:
    """Whether its tokens are trained on, provided that it gets a reward: those of all its samples, or none."""
    if is_overlong(rollout, config) or not rollout.num_tokens:
        return False
    return not (config.algorithm.mask_truncated_completions and rollout.truncated)


def kept_groups(groups: list[Group], config: OrchestratorConfig) -> list[Group]:
    """The groups a step is made of: all, or with `zero_variance_groups: drop` and `resample` those with a signal."""
    if config.algorithm.zero_variance_groups == "keep":
        return groups
    reads = reads_of(config)
    return [group for group in groups if has_signal(group, reads)]


def reads_of(config: OrchestratorConfig) -> Reads:
    """What the configured advantage looks at. With a discount it matters when each part of a reward was earned."""
    reads = ADVANTAGES.get(config.algorithm.advantage_type).reads
    return "steps" if reads == "reward" and config.algorithm.discount < 1 else reads


def has_signal(group: Group, reads: Reads = "reward") -> bool:
    """Whether the group's scored rollouts differ in what the advantage reads, before shaping."""
    seen = set()
    for rollout in group.rollouts:
        if is_scored(rollout):
            parts: tuple[object, ...] = ()
            if reads == "rewards":
                parts = tuple(rollout.rewards.items())
            elif reads == "steps":
                parts = (len(turn_lengths([sample.mask for sample in rollout.samples])), *rollout.step_rewards)
            seen.add((rollout.reward, parts))
    return len(seen) > 1
