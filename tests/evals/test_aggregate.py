"""One number of many scores, how sure it is, and whether it is enough."""

from __future__ import annotations

import math

import pytest

from mrl.evals import EvaluateResult, EvaluationRow, EvaluationThreshold, InputMetadata
from mrl.evals.aggregate import aggregate, passes, standard_error


def rows(*scores: float | None) -> list[EvaluationRow]:
    """None = a score that is not valid."""
    return [
        EvaluationRow(
            input_metadata=InputMetadata(row_id=str(number)),
            evaluation_result=EvaluateResult(score=score or 0.0, is_score_valid=score is not None),
        )
        for number, score in enumerate(scores)
    ]


def test_methods_are_over_the_runs_means_and_invalid_scores_are_in_none() -> None:
    runs = [rows(1.0, 0.0, None), rows(1.0, 1.0, None)]
    assert aggregate(runs, "mean").score == 0.75
    assert aggregate(runs, "max").score == 1.0
    assert aggregate(runs, "min").score == 0.5
    assert 0.5 < aggregate(runs, "bootstrap").score < 1.0
    assert aggregate(runs, "max").standard_error is None


def test_nothing_valid_is_no_score_rather_than_0() -> None:
    found = aggregate([rows(None, None)], "mean")
    assert found.score is None
    assert passes(found, EvaluationThreshold(success=0.0)) is False
    assert passes(found, None) is None


def test_standard_error_of_yes_or_no() -> None:
    # Row 1: 1 of 2 attempts, p(1-p)/(m-1) = 1/4; row 2: always the same. sqrt(1/4) / 2 rows.
    assert standard_error([[1.0, 0.0], [1.0, 1.0]]) == pytest.approx(0.25)
    assert standard_error([[0.5], [1.0]]) == pytest.approx(0.25)


def test_standard_error_of_other_scores_takes_two_attempts() -> None:
    assert standard_error([[3.0], [5.0]]) is None
    assert standard_error([[3.0, 5.0], [4.0, 4.0]]) == pytest.approx(math.sqrt(1.0) / 2)


def test_threshold_of_score_and_error() -> None:
    found = aggregate([rows(1.0, 1.0), rows(1.0, 0.0)], "mean")
    assert found.score == 0.75
    assert passes(found, EvaluationThreshold(success=0.75)) is True
    assert passes(found, EvaluationThreshold(success=0.76)) is False
    assert passes(found, EvaluationThreshold(success=0.5, standard_error=0.1)) is False
    assert passes(found, EvaluationThreshold(success=0.5, standard_error=0.3)) is True
