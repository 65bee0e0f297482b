"""From scored groups to what the actor trains on: the advantage of every rollout, and the batch of their samples."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mrl.algorithms import ADVANTAGES
from mrl.algorithms.advantages import AdvantageInputs, AdvantageSettings
from mrl.algorithms.turns import returns_to_go, spread_over_samples, turn_lengths, turn_rewards
from mrl.config import OrchestratorConfig
from mrl.errors import TrainingError
from mrl.experience.groups import is_scored, is_trainable, kept_groups, reads_of
from mrl.experience.shaping import shaped_reward, shaping
from mrl.types import Group, Rollout, Sample, TrainBatch


def make_batch(groups: list[Group], config: OrchestratorConfig) -> TrainBatch:
    """Advantages for every scored rollout, and their samples for the actor.

    Rollouts of more sampled tokens than `max_completion_length`, and truncated ones under `mask_truncated_completions`,
    count in their group's mean and among those the loss is averaged over, but are not trained on. A rollout counts as
    one, however many samples it has. Samples whose advantage is 0 add nothing to the gradient unless there is a KL or
    entropy term: they count in every average and are not computed. Groups without a signal count nowhere where
    `zero_variance_groups` drops them. Raises TrainingError when the advantage does not take these rewards.
    """
    keeps_all = config.algorithm.keeps_samples_without_advantage()
    for group in groups:
        for rollout in group.rollouts:
            rollout.advantage = 0.0 if is_scored(rollout) else None
    scored = [
        (index, rollout)
        for index, group in enumerate(kept_groups(groups, config))
        for rollout in group.rollouts
        if is_scored(rollout)
    ]
    samples: list[Sample] = []
    advantages: list[float | list[float]] = []
    rollout_tokens: list[int] = []
    tokens = 0
    for (_, rollout), by_sample in zip(scored, _advantages(scored, config), strict=True):
        if not is_trainable(rollout, config):
            continue
        tokens += rollout.num_tokens
        for sample, advantage in zip(rollout.samples, by_sample, strict=True):
            learns = keeps_all or (any(advantage) if isinstance(advantage, list) else advantage != 0)
            if learns and sample.num_sampled:
                samples.append(sample)
                advantages.append(advantage)
                rollout_tokens.append(rollout.num_tokens)
    generation = config.generation
    return TrainBatch(
        samples,
        advantages,
        num_sequences=len(scored),
        num_tokens=tokens,
        temperature=generation.temperature,
        top_p=generation.top_p,
        top_k=generation.top_k,
        min_p=generation.min_p,
        rollout_tokens=rollout_tokens,
    )


def note_per_token(batch: TrainBatch, trained: list[list[float]]) -> None:
    """Into the samples, for the record: what the trainer's logprobs differ by, and advantages that differ by token.

    trained: the trainer's logprobs of each sample; [] when nothing was trained.
    """
    for sample, advantage, logprobs in zip(batch.samples, batch.advantages, trained, strict=bool(trained)):
        pairs = zip(logprobs, sample.logprobs, sample.mask, strict=True)
        sample.trainer_gap = [ours - theirs if sampled else 0.0 for ours, theirs, sampled in pairs]
        if isinstance(advantage, list):
            sample.advantages = advantage


def _advantages(scored: list[tuple[int, Rollout]], config: OrchestratorConfig) -> list[list[float | list[float]]]:
    """For each rollout one advantage per sample: a number, or one per completion token. Sets `Rollout.advantage`."""
    name, algorithm = config.algorithm.advantage_type, config.algorithm
    member = ADVANTAGES.get(name)
    settings = AdvantageSettings(algorithm.scale_rewards, algorithm.normalize_advantages, algorithm.discount)
    try:
        found = member.compute(_inputs(scored, config, steps=reads_of(config) == "steps"), settings)
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
    """steps: whether it matters when each part of a reward was earned. An advantage of the joined reward gets the
    discounted return of the first turn, Σ discount^k r_k."""
    rollouts = [rollout for _, rollout in scored]
    totals = [shaped_reward(rollout) for rollout in rollouts]
    # Reward functions first, in their order, the same for all; then what single rollouts brought, with weight 1.
    names = list(dict.fromkeys(name for rollout in rollouts for name in rollout.rewards))
    columns = [[_number(rollout.rewards.get(name)) for name in names] for rollout in rollouts]
    weights = list(config.reward.reward_weights or [])
    weights += [1.0] * (len(names) - len(weights))
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
        discount = config.algorithm.discount
        if discount < 1 and ADVANTAGES.get(config.algorithm.advantage_type).reads == "reward":
            totals = [returns_to_go(rewards, discount)[0] if rewards else 0.0 for rewards in turns]
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
