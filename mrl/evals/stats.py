"""Statistics for evaluations: pass@k, and intervals that say how sure a score is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

from mrl.experience.groups import PASS

Attempts = Sequence[float | None]
"""The rewards of one task's attempts; None = could not be scored."""
_FEW = 3
"""Successes (or failures) up to which Wilson's interval covers too little."""
_ROUNDING = 1e-9


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


def mean_interval(
    per_task_means: Sequence[float], confidence: float = 0.95, *, between_0_and_1: bool | None = None
) -> Interval:
    """Mean over tasks with its two-sided interval.

    per_task_means: one number per task, e.g. the share of its samples that passed. The task is the unit, since samples
    of one task are correlated: n tasks with 8 samples each are n observations, not 8n.
    between_0_and_1: whether a task's value can lie nowhere else; None = where none of these does. Such a mean gets
    Wilson's interval (`_wilson`), any other one Student's t with n - 1 degrees of freedom, which knows no bounds.

    One task says nothing of the spread, nor do equal values that could be anything: their interval is None to None.
    Raises ValueError for no task at all, and for values outside [0, 1] that are said to be inside.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence}")
    n = len(per_task_means)
    if n == 0:
        raise ValueError("the mean of no task at all")
    inside = all(_is_inside(value) for value in per_task_means)
    if between_0_and_1 and not inside:
        raise ValueError(f"values from {min(per_task_means)} to {max(per_task_means)} do not lie between 0 and 1")
    mean, between_0_and_1 = fmean(per_task_means), inside if between_0_and_1 is None else between_0_and_1
    if n == 1 or (not between_0_and_1 and len(set(per_task_means)) == 1):
        return Interval(mean, None, None)
    if between_0_and_1:
        mean = min(max(mean, 0.0), 1.0)
        return Interval(mean, *_wilson(mean, stdev(per_task_means), n, confidence))
    from scipy.stats import t

    half = float(t.ppf(0.5 + confidence / 2, n - 1)) * stdev(per_task_means) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half)


def pass_rate(tasks: Sequence[Attempts], k: int = 1, confidence: float = 0.95) -> Interval | None:
    """pass@k over tasks; None where no task has k attempts with a score.

    Attempts without a score are not in the mean. The interval is theirs too: it reaches from where it would begin had
    all of them failed to where it would end had all of them passed.
    """

    def of_task(rewards: Sequence[float]) -> float:
        return pass_at_k(len(rewards), sum(reward >= PASS for reward in rewards), k)

    return _despite_unscored(tasks, of_task, k, (-math.inf, math.inf), confidence, between_0_and_1=True)


def mean_reward(tasks: Sequence[Attempts], confidence: float = 0.95) -> Interval | None:
    """Mean over tasks of their attempts' mean reward; None where no attempt has a score.

    Where all rewards lie in [0, 1], attempts without a score count as in `pass_rate`; other rewards have no worst and
    best value to put in their place, and the interval is that of the scored ones.
    """
    between_0_and_1 = all(_is_inside(reward) for attempts in tasks for reward in attempts if reward is not None)
    extremes = (0.0, 1.0) if between_0_and_1 else None
    return _despite_unscored(tasks, fmean, 1, extremes, confidence, between_0_and_1=between_0_and_1)


def _despite_unscored(
    tasks: Sequence[Attempts],
    of_task: Callable[[Sequence[float]], float],
    needed: int,
    extremes: tuple[float, float] | None,
    confidence: float,
    *,
    between_0_and_1: bool,
) -> Interval | None:
    """of_task: a task's value, from `needed` rewards or more. extremes: the lowest and highest reward there can be."""
    scored = [[reward for reward in attempts if reward is not None] for attempts in tasks]
    values = [of_task(rewards) for rewards in scored if len(rewards) >= needed]
    if not values:
        return None
    found = mean_interval(values, confidence, between_0_and_1=between_0_and_1)
    if extremes is None or all(len(rewards) == len(attempts) for rewards, attempts in zip(scored, tasks, strict=True)):
        return found
    worst, best = (
        mean_interval(
            [
                of_task([extreme if reward is None else reward for reward in attempts])
                for attempts in tasks
                if len(attempts) >= needed
            ],
            confidence,
            between_0_and_1=between_0_and_1,
        )
        for extreme in extremes
    )
    return Interval(found.mean, worst.low, best.high)


def _wilson(mean: float, deviation: float, n: int, confidence: float) -> tuple[float, float]:
    """Wilson's score interval of a mean of n values in [0, 1], for as many yes-or-no trials as they are worth.

    deviation: of the n values. Values that are all 0 or 1 are worth a trial each; shares of several attempts vary less,
    and are worth more: n divided by the ratio of their variance to mean (1 - mean) (the effective sample size of
    surveys, Franco et al. 2019, PMC6690503). That ratio is hardly known where nearly all tasks pass, or fail, so it is
    drawn towards 1 with the weight of one task at mean 1/2. Up to three successes (or failures) Poisson's one-sided
    bound takes the place of the nearer end (the modified interval of Brown, Cai & DasGupta 2001,
    doi 10.1214/ss/1009213286).
    """
    from scipy.stats import chi2

    most = mean * (1 - mean)
    informative = 4 * most * n
    ratio = deviation**2 * (n - 1) / n / most if most > 0 else 1.0
    trials = n * (informative + 1) / (informative * ratio + 1)
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    centre = (mean + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(most / trials + (z / (2 * trials)) ** 2)
    low, high = centre - half, centre + half
    passed, failed = mean * trials, (1 - mean) * trials
    if 0 < passed <= _FEW:
        low = min(low, float(chi2.ppf(1 - confidence, 2 * passed)) / 2 / trials)
    if 0 < failed <= _FEW:
        high = max(high, 1 - float(chi2.ppf(1 - confidence, 2 * failed)) / 2 / trials)
    return (0.0 if passed == 0 else max(low, 0.0)), (1.0 if failed == 0 else min(high, 1.0))


def _is_inside(value: float) -> bool:
    """Within [0, 1], but for what a weighted sum loses by rounding."""
    return -_ROUNDING <= value <= 1 + _ROUNDING
