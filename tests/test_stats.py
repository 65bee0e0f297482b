"""Against exact counting, tables, and simulation of what an interval promises."""

from __future__ import annotations

import itertools
import math
import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.stats import mean_interval, mean_pass_at_k, pass_at_k, student_t_quantile, wilson_interval


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


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    # Newcombe 1998, Statistics in Medicine 17, table I, method 3.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_against_newcombes_table(successes: int, n: int, low: float, high: float) -> None:
    assert wilson_interval(successes, n) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))
    mirrored = wilson_interval(n - successes, n)
    assert mirrored == (pytest.approx(1 - high, abs=5e-5), pytest.approx(1 - low, abs=5e-5))


def test_wilson_solves_its_defining_equation() -> None:
    low, high = wilson_interval(7, 30, confidence=0.9)
    for p in (low, high):
        assert abs(7 / 30 - p) / math.sqrt(p * (1 - p) / 30) == pytest.approx(1.6448536269514722, rel=1e-9)


@pytest.mark.parametrize(
    ("p", "degrees", "expected"),
    [
        (0.975, 1, 12.706204736432095),
        (0.975, 2, 4.302652729911275),
        (0.975, 9, 2.2621571627409915),
        (0.995, 5, 4.032142983557536),
        (0.95, 30, 1.697260886593957),
        (0.975, 1000, 1.9623390808264078),
        (0.9995, 3, 12.923978636688485),
        (0.5, 4, 0.0),
        (0.025, 9, -2.2621571627409915),
    ],
)
def test_student_t_quantile_against_known_values(p: float, degrees: int, expected: float) -> None:
    assert student_t_quantile(p, degrees) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("p", [0.6, 0.9, 0.999, 0.1])
def test_student_t_quantile_has_closed_forms(p: float) -> None:
    assert student_t_quantile(p, 1) == pytest.approx(math.tan(math.pi * (p - 0.5)), rel=1e-9)
    assert student_t_quantile(p, 2) == pytest.approx((2 * p - 1) * math.sqrt(2 / (4 * p * (1 - p))), rel=1e-9)


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
        low, high = wilson_interval(sum(passed), 8 * 60)
        over_tasks += interval.low <= 0.5 <= interval.high
        pooled += low <= 0.5 <= high
    assert 0.93 <= over_tasks / runs <= 0.97
    assert pooled / runs < 0.75, "samples of one task are correlated: treating them as independent is far too sure"


def test_wilson_covers_what_it_promises() -> None:
    rng = random.Random(1)
    for p in (0.05, 0.5, 0.9):
        hits = sum(
            low <= p <= high
            for low, high in (wilson_interval(sum(rng.random() < p for _ in range(40)), 40) for _ in range(800))
        )
        assert 0.92 <= hits / 800 <= 0.985


def test_bad_arguments() -> None:
    for call in (
        lambda: wilson_interval(0, 0),
        lambda: wilson_interval(3, 2),
        lambda: wilson_interval(1, 2, confidence=95),
        lambda: mean_interval([1.0]),
        lambda: mean_interval([1.0, 2.0], confidence=0),
        lambda: student_t_quantile(1.0, 3),
        lambda: student_t_quantile(0.5, 0),
    ):
        with pytest.raises(ValueError, match=r"needs|must lie"):
            call()
