"""Which cause is named, from evidence made by hand: where two could be meant, where nothing fits, or none can say."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrl.algorithms.sampling_estimates import SamplingEstimate
from mrl.config import GenerationConfig
from mrl.mismatch.causes import WorkerView, all_causes, find_causes
from mrl.mismatch.probe import MismatchEvidence

ASKED = GenerationConfig(temperature=1.0, top_p=1.0)
UNFIT = {
    "temperature": SamplingEstimate("temperature", 0.9, 0.3),
    "sampling_filter": SamplingEstimate("top_p", 0.8, 0.3),
}
SCORES = {0: [-2.0, -1.0, -3.0], 1: [-2.2, -0.9, -3.2], 2: [-2.4, -0.8, -3.4]}


def evidence(**changes: Any) -> MismatchEvidence:
    made = MismatchEvidence(
        0.3, 0.0, 100, **UNFIT, rounding=0.01, dtype="float32", probe=[([1], [2, 3, 4])], scores=SCORES
    )
    return dataclasses.replace(made, **changes)


def kinds(found: MismatchEvidence, *views: WorkerView) -> list[str]:
    return [cause.kind for cause in find_causes(found, views, ASKED) or all_causes(found, ASKED)]


GOOD = WorkerView("rollout-0", 2, list(SCORES[2]), "float32")


def test_what_fits_is_named_and_nothing_else() -> None:
    assert kinds(evidence(temperature=SamplingEstimate("temperature", 0.7, 0.01)), GOOD) == ["temperature"]
    assert kinds(evidence(sampling_filter=SamplingEstimate("top_k", 20, 0.02)), GOOD) == ["top-k"]
    assert kinds(evidence(gap=0.03), GOOD) == ["dtype"]


def test_two_that_fit_alike_are_both_named_the_better_one_first() -> None:
    both = evidence(
        temperature=SamplingEstimate("temperature", 0.7, 0.02), sampling_filter=SamplingEstimate("top_p", 0.8, 0.01)
    )
    assert kinds(both, GOOD) == ["top-p", "temperature"]
    clear = evidence(
        temperature=SamplingEstimate("temperature", 0.7, 0.001), sampling_filter=SamplingEstimate("top_p", 0.8, 0.05)
    )
    assert kinds(clear, GOOD) == ["temperature"]


def test_other_weights_come_before_what_they_look_like() -> None:
    stale = WorkerView("rollout-1", 2, list(SCORES[1]))
    looks_hot = evidence(temperature=SamplingEstimate("temperature", 0.9, 0.05))
    assert kinds(looks_hot, GOOD, stale) == ["missed sync", "temperature"]
    (cause, _) = find_causes(looks_hot, [GOOD, stale], ASKED)
    assert "rollout-1 says it serves version 2, but scores known tokens as version 1 does" in cause.text
    foreign = WorkerView("rollout-0", 2, [-9.0, -9.0, -9.0])
    assert kinds(evidence(), foreign) == ["missed sync"]


def test_rounding_in_a_worker_is_no_missed_sync() -> None:
    rounded = WorkerView("rollout-0", 2, [value + 0.008 for value in SCORES[2]], "bfloat16")
    assert kinds(evidence(gap=0.02), rounded) == ["dtype"]
    (cause,) = find_causes(evidence(gap=0.02), [rounded], ASKED)
    assert "the trainer computes in float32, the engine in bfloat16" in cause.text


def test_logprobs_that_are_infinite_fit_nothing() -> None:
    broken = evidence(
        gap=math.inf,
        temperature=SamplingEstimate("temperature", 1.0, math.inf),
        sampling_filter=SamplingEstimate("top_p", 1.0, math.inf),
    )
    assert kinds(broken, GOOD)[0] == "missed sync"
    assert len(kinds(broken, GOOD)) == 4


def test_tokens_on_which_both_agree_need_no_explanation() -> None:
    """Scored again, the tokens of a step whose gap was too large may have none."""
    exact = SamplingEstimate("temperature", 1.0, 0.0)
    assert kinds(evidence(gap=0.0, temperature=exact, sampling_filter=exact, rounding=0.0), GOOD) == ["dtype"]


def test_a_bias_is_no_rounding() -> None:
    assert "dtype" not in kinds(evidence(gap=0.03, signed_gap=0.03), GOOD)[:1]


@pytest.mark.parametrize(
    "view",
    [GOOD, WorkerView("rollout-0"), WorkerView("rollout-0", 7, [0.0, 0.0, 0.0]), WorkerView("rollout-0", 2, None)],
    ids=["agrees", "silent", "unknown version", "cannot score"],
)
def test_where_nothing_fits_all_four_are_named_with_what_to_look_at(view: WorkerView) -> None:
    assert find_causes(evidence(), [view], ASKED) == []
    assert kinds(evidence(), view) == ["missed sync", "temperature", "top-p", "dtype"]
    assert kinds(evidence(moved=0.2), view)[0] == "fast updates"


@given(
    gap=st.floats(0, math.inf),
    signed=st.floats(-10, 10),
    left=st.tuples(st.floats(0, math.inf), st.floats(0, math.inf)),
    rounding=st.floats(0, 1),
)
def test_something_is_always_said(gap: float, signed: float, left: tuple[float, float], rounding: float) -> None:
    found = evidence(
        gap=gap,
        signed_gap=signed,
        temperature=SamplingEstimate("temperature", 0.5, left[0]),
        sampling_filter=SamplingEstimate("min_p", 0.1, left[1]),
        rounding=rounding,
    )
    assert all(cause.text for cause in find_causes(found, [GOOD], ASKED))
    assert all(cause.text for cause in all_causes(found, ASKED))
