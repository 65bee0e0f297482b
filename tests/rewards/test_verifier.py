"""The pool of verifiers: each answer alone, what it does comes to it and to nobody else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mrl.errors import RewardError
from mrl.rewards.verifier import UNREADABLE, Outcome, VerifierPool
from mrl.sandbox.confine import selftest
from tests.rewards.answers_badly import WORTH_NOTHING

Make = Callable[..., VerifierPool]


@pytest.fixture(scope="module")
def make() -> Iterator[Make]:
    """Pools of one process, so that answers follow one another."""
    pools = []

    def made(function: str, seconds: float = 2.0) -> VerifierPool:
        pools.append(VerifierPool(f"answers_badly:{function}", seconds, size=1))
        return pools[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        yield made
    for pool in pools:
        pool.close()


def ask(pool: VerifierPool, *texts: str, **task: object) -> list[Outcome]:
    return asyncio.run(pool.ask_all([(task, text) for text in texts]))


def test_what_an_answer_does_comes_to_it_alone(make: Make) -> None:
    texts = [text for act in WORTH_NOTHING for text in (act, "answers")]
    outcomes = ask(make("acting"), *texts)
    for act, outcome in zip(texts, outcomes, strict=True):
        if act == "answers":
            assert outcome == Outcome(True, 1.0)
        else:
            assert outcome.asked, act
            assert outcome.value is None, act
            assert outcome.detail, act


def test_an_answer_answers_for_no_other(make: Make) -> None:
    """Also one that has taken its own process over."""
    outcomes = ask(make("acting"), *["answers the next one too", "leaves", "answers"] * 3)
    assert [outcome.value for outcome in outcomes[1::3]] == [None] * 3
    assert [outcome.value for outcome in outcomes[2::3]] == [1.0] * 3


def test_what_hangs_is_ended_and_the_next_is_answered(make: Make) -> None:
    start = time.monotonic()
    slow, quick = ask(make("sleeping", 0.5), "30", "0", seconds=0.0)
    assert slow == Outcome(True, detail="timeout")
    assert quick == Outcome(True, 1.0)
    assert time.monotonic() - start < 30


def test_what_goes_wrong_with_the_task_is_not_the_answers_failure(make: Make) -> None:
    (late,) = ask(make("sleeping", 0.5), "0", seconds=30.0)
    assert not late.asked
    assert "timeout" in late.detail
    (failed,) = ask(make("failing"), "0")
    assert failed == Outcome(False, detail="RuntimeError: no such task")
    (unreadable,) = ask(make("unreadable"), "0")
    assert unreadable is UNREADABLE


def test_a_layer_that_opens_no_file_is_refused_rather_than_scored_wrong() -> None:
    """A library that cannot import what it needs calls right answers wrong."""
    pytest.importorskip("math_verify")
    if not selftest.test_layer("C").holds:
        pytest.skip("layer C does not work here")
    pool = VerifierPool("mrl.rewards.math_verify:prepare", 5, size=1, layer="C")
    with pytest.raises(RewardError, match=r"cannot open its own files: .*PermissionError"):
        asyncio.run(pool.ask_all([({"gold": "x^2+1"}, "$1+x^2$")]))
    pool.close()


def test_a_library_that_cannot_be_imported_says_so(make: Make) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("answers_badly.LIBRARIES", ("this_does_not_exist",))
        with pytest.raises(RewardError, match="this_does_not_exist"):
            ask(make("acting"), "answers")


def test_a_closed_pool_says_so(make: Make) -> None:
    pool = make("acting")
    pool.close()
    with pytest.raises(RewardError, match="was closed"):
        ask(pool, "answers")
