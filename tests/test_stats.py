"""Against exact counting, tables, and simulation of what an interval promises."""

from __future__ import annotations

import itertools
import math
import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.stats import Interval, mean_interval, mean_pass_at_k, pass_at_k


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


def test_mean_pass_at_k() -> None:
    assert mean_pass_at_k([(4, 4), (4, 0), (4, 1), (2, 1)], 1) == pytest.approx((1 + 0 + 0.25 + 0.5) / 4)
    with pytest.raises(ValueError, match="no task"):
        mean_pass_at_k([], 1)


def test_mean_interval_of_a_worked_example() -> None:
    interval = mean_interval([1.0, 2.0, 3.0, 4.0, 5.0])  # stdev 1.5811, t(4) = 2.7764
    assert (interval.mean, interval.low, interval.high) == pytest.approx((3.0, 1.036757, 4.963243), abs=1e-6)
    assert mean_interval([0.5, 0.5, 0.5]).high == 0.5


def test_mean_interval_covers_what_it_promises_and_pooling_samples_does_not() -> None:
    """60 tasks of different difficulty, 8 samples each: the interval over tasks holds the true mean in 95 % of runs."""
    rng = random.Random(0)
    runs, over_tasks, pooled = 800, 0, 0
    for _ in range(runs):
        passed = [sum(rng.random() < p for _ in range(8)) for p in (rng.betavariate(0.5, 0.5) for _ in range(60))]
        interval = mean_interval([c / 8 for c in passed])
        pooled_interval = mean_interval([float(i < c) for c in passed for i in range(8)])
        over_tasks += interval.low <= 0.5 <= interval.high
        pooled += pooled_interval.low <= 0.5 <= pooled_interval.high
    assert 0.93 <= over_tasks / runs <= 0.97
    assert pooled / runs < 0.75, "samples of one task are correlated: treating them as independent is far too sure"


def test_one_task_has_a_mean_and_no_interval() -> None:
    assert mean_interval([0.25]) == Interval(0.25, None, None)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="must lie"):
        mean_interval([1.0, 2.0], confidence=95)
    with pytest.raises(ValueError, match="no task"):
        mean_interval([])
