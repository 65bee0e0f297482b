"""Which rollouts, samples and groups a step learns from."""

from __future__ import annotations

from typing import Literal

from mrl.algorithms import ADVANTAGES
from mrl.config import OrchestratorConfig
from mrl.types import Group, Rollout, Sample

Reads = Literal["reward", "rewards", "steps"]
"""What an advantage looks at: the joined reward, the reward of each function as well, or the reward of each step."""

PASS = 1.0
"""A rollout passes when its reward reaches this: rewards are meant to lie in [0, 1]."""


def is_scored(rollout: Rollout) -> bool:
    """Whether it was generated and has a reward."""
    return rollout.status == "ok" and rollout.reward is not None and bool(rollout.samples)


def is_overlong(sample: Sample, config: OrchestratorConfig) -> bool:
    """Whether it has more tokens than are trained on."""
    return len(sample.completion_ids) > config.algorithm.max_completion_length


def is_trainable(sample: Sample, config: OrchestratorConfig) -> bool:
    """Whether its tokens are trained on, provided that its rollout gets a reward."""
    if is_overlong(sample, config) or not any(sample.mask):
        return False
    return not (config.algorithm.mask_truncated_completions and sample.finish_reason == "length")


def kept_groups(groups: list[Group], config: OrchestratorConfig) -> list[Group]:
    """The groups a step is made of: all, or with `zero_variance_groups: drop` and `resample` those with a signal."""
    if config.algorithm.zero_variance_groups == "keep":
        return groups
    reads = ADVANTAGES.get(config.algorithm.advantage_type).reads
    return [group for group in groups if has_signal(group, reads)]


def has_signal(group: Group, reads: Reads = "reward") -> bool:
    """Whether the group's scored rollouts differ in what the advantage reads, before shaping."""
    seen = set()
    for rollout in group.rollouts:
        if is_scored(rollout):
            parts = {"reward": (), "rewards": tuple(rollout.rewards.items()), "steps": tuple(rollout.step_rewards)}
            seen.add((rollout.reward, parts[reads]))
    return len(seen) > 1
