"""Scores of an experiment as one number, how sure it is, and whether that is enough."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, variance

from mrl.evals.stats import Interval, mean_interval
from mrl.evaltests.parameters import AggregationMethod
from mrl.evaltests.results import EvaluationThreshold
from mrl.evaltests.rows import EvaluationRow

RESAMPLES = 100
"""Of `bootstrap`."""


@dataclass(frozen=True)
class Aggregate:
    """What the valid scores of an experiment come to."""

    score: float | None
    """None = there is no valid score."""
    standard_error: float | None
    """Of repeating the test on these rows; None where nothing says how scores of one row differ."""
    interval: Interval | None
    """`score` with its confidence interval from that error."""
    over_tasks: Interval | None
    """Mean and interval for other rows like these (`mrl.evals.stats.mean_interval`)."""


def aggregate(
    runs: Sequence[Sequence[EvaluationRow]], method: AggregationMethod, confidence: float = 0.95, seed: int = 0
) -> Aggregate:
    """runs: the rows of each run, which were attempted once in it.

    `mean`, `max` and `min` are over the runs' mean scores, `bootstrap` is the mean of resampled means over all scores.
    """
    valid = [[row for row in run if is_valid(row)] for run in runs]
    means = [fmean(score_of(row) for row in run) for run in valid if run]
    if not means:
        return Aggregate(None, None, None, None)
    every = [score_of(row) for run in valid for row in run]
    if method == "bootstrap":
        draw = random.Random(seed)
        score = fmean(fmean(draw.choices(every, k=len(every))) for _ in range(RESAMPLES))
    else:
        score = max(means) if method == "max" else min(means) if method == "min" else fmean(means)
    by_row: dict[str, list[float]] = defaultdict(list)
    for run in valid:
        for row in run:
            by_row[str(row.input_metadata.row_id)].append(score_of(row))
    error = standard_error(list(by_row.values())) if method == "mean" else None
    interval = None
    if error is not None:
        margin = NormalDist().inv_cdf(0.5 + confidence / 2) * error
        inside = all(0 <= value <= 1 for value in every)
        low, high = score - margin, score + margin
        interval = Interval(score, max(0.0, low) if inside else low, min(1.0, high) if inside else high)
    over_tasks = mean_interval([fmean(scores) for scores in by_row.values()], confidence)
    return Aggregate(score, error, interval, over_tasks)


def standard_error(rows: Sequence[Sequence[float]]) -> float | None:
    """Of the mean over rows of their mean scores, the rows being fixed and the attempts at them drawn anew.

    rows: the scores of each row's attempts. Scores in [0, 1] are taken as the means of yes or no, whose variance their
    mean says, as Eval Protocol does: p(1 - p) / (m - 1) for m attempts, p(1 - p) for one. Of other scores it is the
    sample variance, which takes two attempts at each row; None where there are fewer.
    """
    if all(0 <= score <= 1 for scores in rows for score in scores):
        parts = [fmean(scores) * (1 - fmean(scores)) / max(1, len(scores) - 1) for scores in rows]
    elif any(len(scores) < 2 for scores in rows):
        return None
    else:
        parts = [variance(scores) / len(scores) for scores in rows]
    return math.sqrt(sum(parts)) / len(rows)


def metric_means(rows: Sequence[EvaluationRow], confidence: float = 0.95) -> dict[str, Interval]:
    """Mean and interval of each of the results' metrics, over rows."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        for name, metric in (row.evaluation_result.metrics if row.evaluation_result else {}).items():
            if metric.is_score_valid and math.isfinite(metric.score):
                found.setdefault(name, {}).setdefault(str(row.input_metadata.row_id), []).append(metric.score)
    return {
        name: mean_interval([fmean(scores) for scores in by_row.values()], confidence) for name, by_row in found.items()
    }


def passes(found: Aggregate, wanted: EvaluationThreshold | None) -> bool | None:
    """None where nothing is asked for. Without a valid score it does not."""
    if wanted is None:
        return None
    if found.score is None:
        return False
    certain = wanted.standard_error is None or found.standard_error is None
    return found.score >= wanted.success and (
        certain or (found.standard_error or 0.0) <= (wanted.standard_error or 0.0)
    )


def is_valid(row: EvaluationRow) -> bool:
    """Whether its score counts."""
    return row.evaluation_result is not None and row.evaluation_result.is_score_valid


def score_of(row: EvaluationRow) -> float:
    """Of a row that is valid."""
    assert row.evaluation_result is not None
    return row.evaluation_result.score
