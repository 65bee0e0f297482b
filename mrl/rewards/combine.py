"""Several rewards on one batch: all at once, then one number per row."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from mrl.errors import RewardError
from mrl.rewards.base import AttributeDict, Reward, RewardReport, RewardRequest, RewardResult, Scores, Total


def check_weights(weights: Sequence[float] | None, rewards: Sequence[Reward]) -> None:
    """Raises RewardError when `weights` is not one finite number per reward."""
    if weights is None:
        return
    names = ", ".join(reward.name for reward in rewards)
    if len(weights) != len(rewards):
        raise RewardError(f"reward_weights: {len(weights)} for {len(rewards)} reward_funcs ({names}); give one each")
    for weight, reward in zip(weights, rewards, strict=True):
        if not math.isfinite(weight):
            raise RewardError(f"reward_weights: {weight} for {reward.name} is not a finite number")


async def score_rows(
    rewards: Sequence[Reward],
    requests: list[RewardRequest],
    *,
    weights: Sequence[float] | None = None,
    timeout: float | None = 60.0,
    trainer_state: Any = None,
) -> RewardReport:
    """Score a batch with all rewards concurrently.

    A row's reward is the mean of its rewards that are not `None`, or their sum weighted by `weights`, and what it
    brought itself, with weight 1. It is `None`, with an error, when a reward failed on the row or none applied.
    timeout: seconds for a reward that is not `bounded`. trainer_state: an object or a dict. Raises RewardError when a
    reward breaks its contract.
    """
    state = AttributeDict(trainer_state or {}) if isinstance(trainer_state, dict | None) else trainer_state
    tasks = [asyncio.ensure_future(_score_one(reward, requests, state, timeout)) for reward in rewards]
    try:
        scores = dict(zip((reward.name for reward in rewards), await asyncio.gather(*tasks), strict=True))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    results = [_combine(row, scores, weights, request.own) for row, request in enumerate(requests)]
    return RewardReport(results, _metrics(scores))


def mean_metrics(parts: Iterable[tuple[int, dict[str, float]]]) -> dict[str, float]:
    """What was logged for several parts of a batch, each with its number of rollouts: one mean, or total, per name."""
    sums: dict[str, tuple[int, float]] = {}
    totals: dict[str, float] = {}
    for count, metrics in parts:
        for name, value in metrics.items():
            if isinstance(value, Total):
                totals[name] = Total(totals.get(name, 0.0) + value)
                continue
            rollouts, total = sums.get(name, (0, 0.0))
            sums[name] = rollouts + count, total + count * value
    return {name: total / rollouts for name, (rollouts, total) in sums.items()} | totals


def plain(metrics: dict[str, float]) -> dict[str, float]:
    """For a record: nothing is joined to them any more."""
    return {name: float(value) for name, value in metrics.items()}


def held_out(metrics: dict[str, float]) -> dict[str, float]:
    """What rewards logged under `reward/` during an evaluation, under `eval/`."""
    return {
        f"eval/{name.removeprefix('reward/')}": value
        for name, value in plain(metrics).items()
        if name.startswith("reward/")
    }


async def _score_one(reward: Reward, requests: list[RewardRequest], state: Any, timeout: float | None) -> Scores:
    count = len(requests)
    deadline = asyncio.timeout(None if getattr(reward, "bounded", False) else timeout)
    try:
        async with deadline:
            scores = await reward.score(requests, trainer_state=state)
    except RewardError:
        raise
    except Exception as error:
        if deadline.expired():
            return Scores.failed(count, f"{reward.name}: no result within {timeout} s (reward_timeout)")
        return Scores.failed(count, f"{reward.name} raised {type(error).__name__}: {error}".rstrip(": "))
    if len(scores.values) != count:
        raise RewardError(f"{reward.name} returned {len(scores.values)} values, expected {count}: one per completion")
    for row, value in enumerate(scores.values):
        if value is not None and not math.isfinite(value):
            scores.values[row] = None
            scores.errors.setdefault(row, f"{reward.name} gave {value}, not a finite number")
    return scores


def _combine(
    row: int, scores: dict[str, Scores], weights: Sequence[float] | None, own: dict[str, float | None]
) -> RewardResult:
    values = {name: s.values[row] for name, s in scores.items()}
    result = RewardResult(None, values | own, extra=_extra(row, scores))
    errors = [s.errors[row] for s in scores.values() if row in s.errors]
    if errors:
        result.error = "; ".join(errors)
        return result
    parts = [(v, weights[k] if weights else 1.0) for k, v in enumerate(values.values()) if v is not None]
    brought = [value for value in own.values() if value is not None]
    if not parts and not brought:
        result.error = f"no reward function scored it ({', '.join(scores)} returned None)"
        return result
    total = sum(value * weight for value, weight in parts)
    result.reward = (total if weights else total / max(len(parts), 1)) + sum(brought)
    if not math.isfinite(result.reward):
        result.reward, result.error = None, f"the rewards add up to {result.reward}"
    return result


def _extra(row: int, scores: dict[str, Scores]) -> dict[str, Any]:
    extra: dict[str, Any] = {}
    for name, score in scores.items():
        for column, values in score.extra.items():
            extra[f"{name}/{column}" if column in extra else column] = values[row]
    return extra


def _metrics(scores: dict[str, Scores]) -> dict[str, float]:
    gathered: dict[str, list[float]] = {}
    for score in scores.values():
        for name, values in score.metrics.items():
            gathered.setdefault(name, []).extend(values)
    return {
        name: Total(sum(values)) if isinstance(values[0], Total) else fmean(values)
        for name, values in gathered.items()
        if values
    }
