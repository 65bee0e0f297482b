"""Statistics for evaluations: pass@k, and intervals that say how sure a score is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its two-sided confidence interval."""

    mean: float
    low: float | None
    high: float | None


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that at least one of k samples drawn from n passes, when c of the n passed: 1 - C(n-c, k) / C(n, k).

    The unbiased estimator of Chen et al. 2021 (arXiv 2107.03374, eq. 1), as a product of k factors at most, so that no
    binomial overflows. Raises ValueError unless 1 <= k <= n and 0 <= c <= n.
    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@k needs 1 <= k <= n, got k={k} with n={n} samples: take a smaller k or more samples")
    if not 0 <= c <= n:
        raise ValueError(f"pass@k needs 0 <= c <= n, got c={c} passed of n={n} samples")
    if n - c < k:
        return 1.0
    # C(n-c, k) / C(n, k) has k factors, or, written by complements, c: take the shorter product.
    if c < k:
        return 1.0 - math.prod((n - k - i) / (n - i) for i in range(c))
    return 1.0 - math.prod((n - c - i) / (n - i) for i in range(k))


def mean_pass_at_k(counts: Iterable[tuple[int, int]], k: int) -> float:
    """Mean pass@k over tasks. counts: (n samples, c passed) of each task. Raises ValueError, also for no task."""
    values = [pass_at_k(n, c, k) for n, c in counts]
    if not values:
        raise ValueError("pass@k of no task at all")
    return fmean(values)


def mean_interval(per_task_means: Sequence[float], confidence: float = 0.95) -> Interval:
    """Mean over tasks with Student's t interval, n - 1 degrees of freedom.

    per_task_means: one number per task, e.g. the share of its samples that passed. The task is the unit, since samples
    of one task are correlated: n tasks with 8 samples each are n observations, not 8n. Not cut to [0, 1]. Meant for
    evaluations of 20 tasks and more; with few tasks that nearly all pass (or fail) its coverage is below `confidence`.
    One task says nothing of the spread: its interval is None to None. Raises ValueError for no task at all.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence}")
    n = len(per_task_means)
    if n == 0:
        raise ValueError("the mean of no task at all")
    mean = fmean(per_task_means)
    if n == 1:
        return Interval(mean, None, None)
    from scipy.stats import t

    half = float(t.ppf(0.5 + confidence / 2, n - 1)) * stdev(per_task_means) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half)
