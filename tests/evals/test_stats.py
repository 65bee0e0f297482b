"""Against exact counting, tables, and simulation of what an interval promises."""

from __future__ import annotations

import itertools
import math
import random
from fractions import Fraction

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.evals.stats import Interval, mean_interval, mean_reward, pass_at_k, pass_rate


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 300).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_equals_the_formula_in_exact_arithmetic(case: tuple[int, int, int]) -> None:
    n, c, k = case
    exact = 1 - Fraction(math.comb(n - c, k), math.comb(n, k))
    assert pass_at_k(n, c, k) == pytest.approx(float(exact), abs=1e-12)


def test_pass_at_k_equals_counting_every_draw() -> None:
    for n in range(1, 7):
        for c in range(n + 1):
            for k in range(1, n + 1):
                draws = list(itertools.combinations([True] * c + [False] * (n - c), k))
                assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_pass_at_k_is_unbiased() -> None:
    n, k, p = 10, 4, 0.2
    weights = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    expected = sum(weight * pass_at_k(n, c, k) for c, weight in enumerate(weights))
    assert expected == pytest.approx(1 - (1 - p) ** k, abs=1e-12)


def test_pass_at_k_holds_for_large_numbers() -> None:
    assert pass_at_k(10**6, 1, 10**5) == pytest.approx(0.1, rel=1e-12)
    assert pass_at_k(10**6, 10, 1) == pytest.approx(1e-5, rel=1e-9)
    assert pass_at_k(200, 0, 100) == 0.0
    assert pass_at_k(200, 101, 100) == 1.0


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 1), (4, -1, 1), (0, 0, 1)])
def test_pass_at_k_refuses(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match=r"pass@k needs"):
        pass_at_k(n, c, k)


def test_mean_interval_of_a_worked_example() -> None:
    interval = mean_interval([1.0, 2.0, 3.0, 4.0, 5.0])  # stdev 1.5811, t(4) = 2.7764
    assert (interval.mean, interval.low, interval.high) == pytest.approx((3.0, 1.036757, 4.963243), abs=1e-6)


CASES = [(n, k, within) for n in (10, 22, 100) for k, within in ((1, 1.0), (4, 0.0), (8, 0.3), (8, 0.8))]
RATES = (0.03, 0.5, 0.99)


def coverage(rate: float, n: int, k: int, within: float, confidence: float = 0.95, runs: int = 300) -> float:
    """How often the interval holds `rate`. n tasks, k attempts each, correlated by `within` (beta-binomial)."""
    rng = numpy.random.default_rng([int(rate * 1000), n, k, int(within * 10)])
    if within in (0.0, 1.0):
        chances = rng.random((runs, n)) < rate if within else numpy.full((runs, n), rate)
    else:
        spread = (1 - within) / within
        chances = rng.beta(rate * spread, (1 - rate) * spread, (runs, n))
    shares = rng.binomial(k, chances) / k
    intervals = [mean_interval(row, confidence) for row in shares.tolist()]
    assert all(0 <= found.low <= found.mean <= found.high <= 1 and found.low < found.high for found in intervals)
    return sum(found.low <= rate <= found.high for found in intervals) / runs


@pytest.mark.parametrize("rate", RATES)
def test_a_rate_is_covered_near_0_and_1_with_few_tasks_and_correlated_attempts(rate: float) -> None:
    covered = {case: coverage(rate, *case) for case in CASES}
    assert min(covered.values()) > 0.89, covered
    assert 0.935 <= sum(covered.values()) / len(covered) <= 0.995, covered


@pytest.mark.soak
@pytest.mark.parametrize("confidence", [0.95, 0.99])
@pytest.mark.parametrize("rate", [0.005, 0.01, 0.1, 0.4, 0.7, 0.9, 0.97])
def test_a_rate_is_covered_at_every_level(rate: float, confidence: float) -> None:
    covered = {case: coverage(rate, *case, confidence, runs=600) for case in [*CASES, (5, 4, 0.5), (300, 4, 0.5)]}
    assert min(covered.values()) > confidence - 0.05, covered
    mean = sum(covered.values()) / len(covered)
    assert confidence - 0.01 <= mean <= confidence + 0.7 * (1 - confidence), covered


def test_tasks_are_the_unit() -> None:
    """60 tasks of different difficulty, 8 samples each: as many as 480 independent samples would be far too sure."""
    rng = random.Random(0)
    passed = [sum(rng.random() < p for _ in range(8)) for p in (rng.betavariate(0.5, 0.5) for _ in range(60))]
    over_tasks = mean_interval([c / 8 for c in passed])
    pooled = mean_interval([float(i < c) for c in passed for i in range(8)])
    assert (over_tasks.high - over_tasks.low) > 2 * (pooled.high - pooled.low)


def test_a_perfect_score_is_not_certain() -> None:
    assert mean_interval([1.0] * 22).high == 1.0
    assert mean_interval([1.0] * 22).low == pytest.approx(0.851, abs=0.001)  # Wilson's for 22 of 22
    assert mean_interval([0.0] * 22) == Interval(0.0, 0.0, pytest.approx(0.149, abs=0.001))
    assert mean_interval([1.0, 0.0]).low > 0
    near = mean_interval([1.0] * 21 + [0.75])
    assert 0.851 < near.low < 0.99 < near.high < 1
    assert mean_interval([1.0 + 1e-12] * 4 + [0.5]).high <= 1, "what a weighted sum loses by rounding"


def test_yes_or_no_tasks_get_wilsons_interval() -> None:
    found = mean_interval([1.0] * 30 + [0.0] * 70)  # by the formula: 0.2189 to 0.3958
    assert (found.low, found.high) == pytest.approx((0.2189, 0.3958), abs=1e-4)


def test_values_outside_0_and_1_get_students_t() -> None:
    """Not cut to [0, 1], also where every task's mean happens to lie inside."""
    values = [-1.0, 1.0, 3.0, 5.0]
    assert mean_interval(values).low < -1 < 5 < mean_interval(values).high
    assert mean_interval([0.0, 1.0], between_0_and_1=False).low < 0
    assert mean_interval([2.0, 2.0, 2.0]) == Interval(2.0, None, None), "equal values say nothing of the spread"
    assert (
        mean_reward([[-1.0, 2.0], [0.5, 0.5], [0.5, 0.4]]).low
        == mean_interval([0.5, 0.5, 0.45], between_0_and_1=False).low
    )
    rng = numpy.random.default_rng(0)
    draws = rng.normal(3.0, 2.0, (600, 12)).tolist()
    covered = sum(found.low <= 3.0 <= found.high for found in map(mean_interval, draws)) / len(draws)
    assert 0.93 <= covered <= 0.97


def test_attempts_without_a_score_widen_the_interval() -> None:
    tasks = [[1.0, None], [0.0, 1.0], [None, None], [1.0, 1.0]] * 5
    rate, complete = pass_rate(tasks), pass_rate([task for task in tasks if None not in task])
    assert rate.mean == pytest.approx((1 + 0.5 + 1) / 3)
    assert rate.low == pass_rate([[reward or 0.0 for reward in task] for task in tasks]).low < complete.low
    assert rate.high == pass_rate([[1.0 if r is None else r for r in task] for task in tasks]).high >= rate.mean
    twice = pass_rate(tasks, 2)
    assert twice.mean == 1.0, "of the tasks with two scores"
    assert twice.low < 0.7
    assert pass_rate([[None], [1.0]], 2) is None
    assert mean_reward([[None], [None, None]]) is None
    assert mean_reward([[None, 3.0], [1.0, 2.0]]) == mean_reward([[3.0], [1.0, 2.0]]), "no reward is the worst there is"


def test_attempts_that_fail_more_often_without_a_score_are_covered_too() -> None:
    rng = numpy.random.default_rng(1)
    covered = 0
    for _ in range(200):
        passed = rng.random((40, 2)) < 0.6
        lost = rng.random((40, 2)) < numpy.where(passed, 0.05, 0.4)
        tasks = [
            [None if gone else float(ok) for ok, gone in zip(*rows, strict=True)]
            for rows in zip(passed, lost, strict=True)
        ]
        found = pass_rate(tasks)
        covered += found.low <= 0.6 <= found.high
    assert covered >= 190


def test_one_task_has_a_mean_and_no_interval() -> None:
    assert mean_interval([0.25]) == Interval(0.25, None, None)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="must lie"):
        mean_interval([1.0, 2.0], confidence=95)
    with pytest.raises(ValueError, match="no task"):
        mean_interval([])
    with pytest.raises(ValueError, match="do not lie"):
        mean_interval([0.0, 2.0], between_0_and_1=True)
