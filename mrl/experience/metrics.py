"""What a step's rollouts come to, as numbers by name (docs/metrics.md)."""

from __future__ import annotations

from statistics import fmean, pstdev

import torch

from mrl.algorithms.advantages import zero_variance_fraction
from mrl.config import OrchestratorConfig
from mrl.experience.groups import PASS, is_overlong, is_scored, kept_groups
from mrl.experience.shaping import shaped_reward
from mrl.types import Group


def rollout_metrics(groups: list[Group], config: OrchestratorConfig, prefix: str = "reward") -> dict[str, float]:
    """Rewards by function, pass rate, groups without variance, lengths, truncation and failures of a step.

    prefix: of the rewards' names; where it is not `reward`, of all names."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    scored = [rollout for rollout in rollouts if is_scored(rollout)]
    rewards = [rollout.reward for rollout in scored if rollout.reward is not None]
    lengths = [rollout.num_tokens for rollout in rollouts if rollout.samples]
    where = "rollout" if prefix == "reward" else prefix
    metrics: dict[str, float] = {f"{where}/failed_fraction": 1 - len(scored) / len(rollouts)}
    if rewards:
        index_of = {id(rollout): index for index, group in enumerate(groups) for rollout in group.rollouts}
        groups_B = torch.tensor([index_of[id(rollout)] for rollout in scored])
        metrics |= {
            f"{prefix}/mean": fmean(rewards),
            f"{prefix}/std": pstdev(rewards),
            f"{prefix}/pass_rate": sum(reward >= PASS for reward in rewards) / len(rewards),
            f"{prefix}/zero_variance_groups": zero_variance_fraction(torch.tensor(rewards), groups_B),
        }
        for name in scored[0].rewards:
            values = [value for rollout in scored if (value := rollout.rewards.get(name)) is not None]
            if values:
                metrics |= {f"{prefix}/{name}/mean": fmean(values), f"{prefix}/{name}/std": pstdev(values)}
    if lengths:
        metrics |= {
            f"{where}/completion_length_mean": fmean(lengths),
            f"{where}/completion_length_max": float(max(lengths)),
            f"{where}/truncated_fraction": sum(r.truncated for r in rollouts) / len(rollouts),
            f"{where}/overlong": float(sum(is_overlong(s, config) for r in rollouts for s in r.samples)),
        }
    return metrics


def shaping_metrics(groups: list[Group], config: OrchestratorConfig) -> dict[str, float]:
    """Means of what was added to the rewards, by term, and how many groups a step was made of."""
    scored = [rollout for group in groups for rollout in group.rollouts if is_scored(rollout)]
    metrics: dict[str, float] = {}
    terms = sorted({name for rollout in scored for name in rollout.metrics if name.startswith("shaping/")})
    for name in terms:
        values = [rollout.metrics[name] for rollout in scored if name in rollout.metrics]
        metrics[f"reward/{name.removeprefix('shaping/')}_shaping"] = fmean(values)
    if terms:
        metrics["reward/shaped_mean"] = fmean(map(shaped_reward, scored))
    if config.algorithm.zero_variance_groups != "keep":
        metrics["rollout/groups"] = float(len(groups))
        metrics["rollout/groups_dropped"] = float(len(groups) - len(kept_groups(groups, config)))
    return metrics
