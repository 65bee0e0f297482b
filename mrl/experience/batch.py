"""What a step learns from its groups: advantages, the batch for the actor, and the step's reward metrics."""

from __future__ import annotations

import math
from statistics import fmean, pstdev

import torch
from torch import Tensor

from mrl.algorithms import ADVANTAGES
from mrl.algorithms.advantages import AdvantageInputs, AdvantageSettings, zero_variance_fraction
from mrl.algorithms.turns import spread_over_samples, turn_lengths, turn_rewards
from mrl.config import OrchestratorConfig
from mrl.errors import TrainingError
from mrl.experience.causes import group_causes, in_lines
from mrl.experience.shaping import is_scored, shaped_reward, shaping, teaches
from mrl.experience.stats import PASS
from mrl.types import Group, Rollout, Sample, TrainBatch

__all__ = [
    "check_failures",
    "check_steps",
    "make_batch",
    "rollout_metrics",
    "shaping_metrics",
    "teaching_groups",
]


def make_batch(groups: list[Group], config: OrchestratorConfig) -> TrainBatch:
    """Advantages for every scored rollout, and their samples for the actor.

    Completions longer than `max_completion_length`, and truncated ones under `mask_truncated_completions`, count in
    their group's mean and among the sequences the loss is averaged over, but are not trained on. Samples whose
    advantage is 0 add nothing to the gradient unless there is a KL or entropy term: they count in every average and are
    not computed. Groups that teach nothing count nowhere where `zero_variance_groups` drops them. Raises TrainingError
    when the advantage does not take these rewards.
    """
    keeps_all = config.algorithm.keeps_samples_without_advantage()
    for group in groups:
        for rollout in group.rollouts:
            rollout.advantage = 0.0 if is_scored(rollout) else None
    scored = [
        (index, rollout)
        for index, group in enumerate(teaching_groups(groups, config))
        for rollout in group.rollouts
        if is_scored(rollout)
    ]
    samples: list[Sample] = []
    advantages: list[float | list[float]] = []
    sequences = tokens = 0
    for (_, rollout), by_sample in zip(scored, _advantages(scored, config), strict=True):
        for sample, advantage in zip(rollout.samples, by_sample, strict=True):
            sequences += 1
            if not _trainable(sample, config):
                continue
            tokens += sum(sample.mask)
            if keeps_all or (any(advantage) if isinstance(advantage, list) else advantage != 0):
                samples.append(sample)
                advantages.append(advantage)
    generation = config.generation
    return TrainBatch(
        samples,
        advantages,
        num_sequences=sequences,
        num_tokens=tokens,
        temperature=generation.temperature,
        top_p=generation.top_p,
        top_k=generation.top_k,
        min_p=generation.min_p,
    )


def teaching_groups(groups: list[Group], config: OrchestratorConfig) -> list[Group]:
    """The groups a step is made of: all, or those that are not dropped for having learned nothing."""
    if config.algorithm.zero_variance_groups == "keep":
        return groups
    reads = ADVANTAGES.get(config.algorithm.advantage_type).reads
    return [group for group in groups if teaches(group, reads)]


def check_steps(groups: list[Group], config: OrchestratorConfig) -> None:
    """Mark rollouts failed whose step rewards cannot be told apart by turn, where the advantage needs them to be."""
    if ADVANTAGES.get(config.algorithm.advantage_type).reads != "steps":
        return
    for rollout in (rollout for group in groups for rollout in group.rollouts if is_scored(rollout)):
        try:
            turn_rewards(0.0, rollout.step_rewards, len(turn_lengths([sample.mask for sample in rollout.samples])))
        except ValueError as error:
            rollout.fail(f"advantage_type {config.algorithm.advantage_type}: {error}")


def reference_samples(groups: list[Group], config: OrchestratorConfig) -> list[Sample]:
    """The samples whose logprobs under the reference model the step may need, whatever their reward turns out to be."""
    if config.algorithm.beta == 0:
        return []
    samples = [sample for group in groups for rollout in group.rollouts for sample in rollout.samples]
    if config.algorithm.kl_in == "reward":
        return samples
    return [sample for sample in samples if _trainable(sample, config)]


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
            f"{where}/overlong": float(sum(_overlong(s, config) for r in rollouts for s in r.samples)),
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
        metrics["rollout/groups_dropped"] = float(len(groups) - len(teaching_groups(groups, config)))
    return metrics


def check_failures(groups: list[Group], config: OrchestratorConfig, step: int) -> None:
    """Raise TrainingError, with the causes counted, when too many of a step's rollouts failed."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    failed = [rollout for rollout in rollouts if not is_scored(rollout)]
    if len(failed) <= config.training.max_failed_fraction * len(rollouts):
        return
    what = "scored" if all(rollout.samples for rollout in failed) else "generated or scored"
    raise TrainingError(
        f"step {step}: {len(failed):,} of {len(rollouts):,} rollouts could not be {what} (max_failed_fraction is "
        f"{config.training.max_failed_fraction}). Causes:\n"
        + in_lines(group_causes((rollout.error, 1) for rollout in failed))
    )


def _advantages(scored: list[tuple[int, Rollout]], config: OrchestratorConfig) -> list[list[float | list[float]]]:
    """For each rollout one advantage per sample: a number, or one per completion token. Sets `Rollout.advantage`."""
    name, algorithm = config.algorithm.advantage_type, config.algorithm
    member = ADVANTAGES.get(name)
    settings = AdvantageSettings(algorithm.scale_rewards, algorithm.normalize_advantages, algorithm.discount)
    try:
        found = member.compute(_inputs(scored, config, steps=member.reads == "steps"), settings)
    except ValueError as error:
        raise TrainingError(f"advantage_type {name}: {error}") from None
    advantages: list[list[float | list[float]]] = []
    for (_, rollout), value in zip(scored, found, strict=True):
        if value.dim() == 0:
            rollout.advantage = value.item()
            advantages.append([rollout.advantage] * len(rollout.samples))
        else:
            rollout.advantage = value.mean().item() if value.numel() else 0.0
            advantages.append([*spread_over_samples(value.tolist(), rollout)])
    return advantages


def _inputs(scored: list[tuple[int, Rollout]], config: OrchestratorConfig, *, steps: bool) -> AdvantageInputs:
    rollouts = [rollout for _, rollout in scored]
    totals = [shaped_reward(rollout) for rollout in rollouts]
    names = list(rollouts[0].rewards) if rollouts else []
    columns = [[_number(rollout.rewards.get(name)) for name in names] for rollout in rollouts]
    weights = list(config.reward.reward_weights or [1.0] * len(names))
    if not names:  # scored where it was made, not by reward functions
        columns, weights = [[_number(rollout.reward)] for rollout in rollouts], [1.0]
    if any(shaping(rollout) for rollout in rollouts):
        columns = [[*row, shaping(rollout)] for row, rollout in zip(columns, rollouts, strict=True)]
        weights.append(1.0)
    lengths: list[list[int]] = []
    turns: list[list[float]] = []
    if steps:  # it looks at every token
        lengths = [turn_lengths([sample.mask for sample in rollout.samples]) for rollout in rollouts]
        turns = [turn_rewards(t, r.step_rewards, len(n)) for t, r, n in zip(totals, rollouts, lengths, strict=True)]
    return AdvantageInputs(
        rewards_B=_tensor(totals),
        groups_B=torch.tensor([index for index, _ in scored], dtype=torch.long),
        rewards_BK=_tensor(columns).reshape(len(rollouts), len(weights)),
        weights_K=_tensor(weights),
        turn_rewards=turns,
        turn_lengths=lengths,
    )


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _tensor(values: list[float] | list[list[float]]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _overlong(sample: Sample, config: OrchestratorConfig) -> bool:
    return len(sample.completion_ids) > config.algorithm.max_completion_length


def _trainable(sample: Sample, config: OrchestratorConfig) -> bool:
    if _overlong(sample, config) or not any(sample.mask):
        return False
    return not (config.algorithm.mask_truncated_completions and sample.finish_reason == "length")
