"""Statistics for evaluations: pass@k, and intervals that say how sure a score is. Pure Python, no dependency."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its two-sided confidence interval."""

    mean: float
    low: float
    high: float


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


def wilson_interval(successes: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Score interval of a proportion (Wilson 1927): (low, high) in [0, 1]; sound near 0 and 1, and for small n.

    For n independent trials. Samples of one task are not independent of each other: use `mean_interval` over tasks.
    Raises ValueError unless 0 <= successes <= n, n >= 1 and 0 < confidence < 1.
    """
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"needs 0 <= successes <= n and n >= 1, got {successes} of {n}")
    z = NormalDist().inv_cdf(0.5 + _checked(confidence) / 2)
    p = successes / n
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    low = 0.0 if successes == 0 else max(0.0, middle - half)
    high = 1.0 if successes == n else min(1.0, middle + half)
    return low, high


def mean_interval(per_task_means: Sequence[float], confidence: float = 0.95) -> Interval:
    """Mean over tasks with Student's t interval, n - 1 degrees of freedom.

    per_task_means: one number per task, e.g. the share of its samples that passed. The task is the unit, since samples
    of one task are correlated: n tasks with 8 samples each are n observations, not 8n. Not cut to [0, 1]. Meant for
    evaluations of 20 tasks and more; with few tasks that nearly all pass (or fail) its coverage is below `confidence`.
    One task, or none: ValueError. Equal values give an interval of width 0, which says only that they are equal.
    """
    n = len(per_task_means)
    if n < 2:
        raise ValueError(f"an interval needs at least 2 tasks, got {n}")
    mean = fmean(per_task_means)
    half = student_t_quantile(0.5 + _checked(confidence) / 2, n - 1) * stdev(per_task_means) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half)


def student_t_quantile(p: float, degrees: int) -> float:
    """The t with P(T <= t) = p for Student's distribution with `degrees` >= 1 degrees of freedom, 0 < p < 1.

    By bisection on the exact distribution function; accurate to about 1e-10 relative.
    """
    if degrees < 1 or not 0 < p < 1:
        raise ValueError(f"needs degrees >= 1 and 0 < p < 1, got degrees={degrees}, p={p}")
    if p < 0.5:
        return -student_t_quantile(1 - p, degrees)
    low, high = 0.0, 1.0
    while _t_upper_tail(high, degrees) > 1 - p:
        low, high = high, high * 2
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if _t_upper_tail(middle, degrees) > 1 - p:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _t_upper_tail(t: float, degrees: int) -> float:
    """P(T > t) for t >= 0: half the regularised incomplete beta function I_x(d/2, 1/2) at x = d / (d + t²)."""
    return 0.5 * _incomplete_beta(degrees / 2, 0.5, degrees / (degrees + t * t), t * t / (degrees + t * t))


def _incomplete_beta(a: float, b: float, x: float, y: float) -> float:
    """I_x(a, b) with y = 1 - x given apart, so that it is not lost where x is near 1 (Numerical Recipes, 6.4)."""
    if x <= 0:
        return 0.0
    if y <= 0:
        return 1.0
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(y))
    if x < (a + 1) / (a + b + 2):
        return front * _continued_fraction(a, b, x) / a
    return 1.0 - front * _continued_fraction(b, a, y) / b


def _continued_fraction(a: float, b: float, x: float) -> float:
    """Lentz's method for the continued fraction of the incomplete beta function."""
    tiny = 1e-300
    c, d = 1.0, 1.0 / (1.0 - (a + b) * x / (a + 1) or tiny)
    value = d
    for m in range(1, 1000):
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1.0 / (1.0 + numerator * d or tiny)
            c = 1.0 + numerator / c or tiny
            value *= c * d
        if abs(c * d - 1.0) < 1e-15:
            break
    return value


def _checked(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence}")
    return confidence
