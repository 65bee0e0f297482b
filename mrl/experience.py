"""What a step learns from its groups: advantages, the batch for the actor, and the step's reward metrics."""

from __future__ import annotations

from collections import Counter
from statistics import fmean, pstdev

import torch

from mrl.algorithms.advantages import group_advantages, zero_variance_fraction
from mrl.config import OrchestratorConfig
from mrl.errors import TrainingError
from mrl.types import Group, Rollout, Sample, TrainBatch

PASS = 1.0
"""A rollout passes when its reward reaches this: rewards are meant to lie in [0, 1]."""


def make_batch(groups: list[Group], config: OrchestratorConfig) -> TrainBatch:
    """Advantages for every scored rollout, and their samples for the actor.

    Completions longer than `max_completion_length`, and truncated ones under `mask_truncated_completions`, count in
    their group's mean and among the sequences the loss is averaged over, but are not trained on. Samples whose
    advantage is 0 add nothing to the gradient unless there is a KL term: they count in every average and are not
    computed.
    """
    scored = [(index, rollout) for index, group in enumerate(groups) for rollout in group.rollouts if _scored(rollout)]
    rewards_B = torch.tensor([rollout.reward for _, rollout in scored], dtype=torch.float64)
    groups_B = torch.tensor([index for index, _ in scored], dtype=torch.long)
    advantages_B = group_advantages(rewards_B, groups_B, config.training.scale_rewards)
    samples: list[Sample] = []
    advantages: list[float] = []
    sequences = tokens = 0
    for (_, rollout), advantage in zip(scored, advantages_B.tolist(), strict=True):
        rollout.advantage = advantage
        for sample in rollout.samples:
            sequences += 1
            if not _trainable(sample, config):
                continue
            tokens += sum(sample.mask)
            if advantage != 0 or config.training.beta > 0:
                samples.append(sample)
                advantages.append(advantage)
    return TrainBatch(
        samples, advantages, num_sequences=sequences, num_tokens=tokens, temperature=config.generation.temperature
    )


def reference_samples(groups: list[Group], config: OrchestratorConfig) -> list[Sample]:
    """The samples whose logprobs under the reference model the step may need, whatever their reward turns out to be."""
    if config.training.beta == 0:
        return []
    samples = (sample for group in groups for rollout in group.rollouts for sample in rollout.samples)
    return [sample for sample in samples if _trainable(sample, config)]


def rollout_metrics(groups: list[Group], config: OrchestratorConfig, prefix: str = "reward") -> dict[str, float]:
    """Rewards by function, pass rate, groups without variance, lengths, truncation and failures of a step."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    scored = [rollout for rollout in rollouts if _scored(rollout)]
    rewards = [rollout.reward for rollout in scored if rollout.reward is not None]
    lengths = [rollout.num_tokens for rollout in rollouts if rollout.samples]
    metrics: dict[str, float] = {"rollout/failed_fraction": 1 - len(scored) / len(rollouts)}
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
            "rollout/completion_length_mean": fmean(lengths),
            "rollout/completion_length_max": float(max(lengths)),
            "rollout/truncated_fraction": sum(r.truncated for r in rollouts) / len(rollouts),
            "rollout/overlong": float(sum(_overlong(s, config) for r in rollouts for s in r.samples)),
        }
    return metrics


def check_failures(groups: list[Group], config: OrchestratorConfig, step: int) -> None:
    """Raise TrainingError, with the causes counted, when too many of a step's rollouts failed."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    failed = [rollout for rollout in rollouts if not _scored(rollout)]
    if len(failed) > config.training.max_failed_fraction * len(rollouts):
        causes = Counter((rollout.error or "unknown") for rollout in failed).most_common(3)
        listed = "\n".join(f"  {count} x {cause}" for cause, count in causes)
        raise TrainingError(
            f"step {step}: {len(failed)} of {len(rollouts)} rollouts could not be generated or scored "
            f"(max_failed_fraction is {config.training.max_failed_fraction}). Causes:\n{listed}"
        )


def _scored(rollout: Rollout) -> bool:
    return rollout.status == "ok" and rollout.reward is not None and bool(rollout.samples)


def _overlong(sample: Sample, config: OrchestratorConfig) -> bool:
    return len(sample.completion_ids) > config.training.max_completion_length


def _trainable(sample: Sample, config: OrchestratorConfig) -> bool:
    if _overlong(sample, config) or not any(sample.mask):
        return False
    return not (config.training.mask_truncated_completions and sample.finish_reason == "length")
