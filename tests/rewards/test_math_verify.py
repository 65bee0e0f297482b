"""Mathematical answers against the library itself: what is equal, what is not, what cannot be told, what hangs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from mrl.errors import RewardError
from mrl.rewards import resolve_rewards
from mrl.rewards.base import RewardRequest, Scores
from mrl.rewards.math_verify import MathVerifyReward
from mrl.workers.reward import RewardWorker

pytest.importorskip("math_verify")


@pytest.fixture(scope="module")
def reward() -> Iterator[MathVerifyReward]:
    (made,) = resolve_rewards("math_verify")
    assert isinstance(made, MathVerifyReward)
    yield made
    made.close()


def score(reward: Any, pairs: list[tuple[Any, str]], column: str = "answer") -> Scores:
    requests = [RewardRequest(str(k), "p", answer, [], {column: gold}) for k, (gold, answer) in enumerate(pairs)]
    return asyncio.run(reward.score(requests, trainer_state=None))


EQUAL = [
    ("1/2", "so it is $\\boxed{0.5}$"),
    ("\\frac{1}{2}", "The answer is $\\frac12$."),
    ("x^2+1", "\\boxed{1+x^2}"),
    ("(1,2)", "$(1, 2)$"),
    ("Half of 36 is 18.\n#### 18", "she makes 18 dollars"),
    ("$\\sqrt{8}$", "$2\\sqrt{2}$"),
    ("-27", "20 - 47 = -27"),
    ("1,000", "\\boxed{1000}"),
    (42, "42"),
    (3.0, "\\boxed{3}"),
]
OTHER = [("1/2", "0.25"), ("1/2", "no idea"), ("18", ""), ("x^2+1", "\\boxed{x^2}"), ("5", "\\boxed{4}")]


def test_equal_answers_earn_one_and_others_nothing(reward: MathVerifyReward) -> None:
    scores = score(reward, EQUAL + OTHER)
    assert scores.values == [1.0] * len(EQUAL) + [0.0] * len(OTHER)
    assert not scores.errors
    assert scores.extra["math_answer"][len(EQUAL) + 1] is None


def test_it_agrees_with_the_library_called_by_hand(reward: MathVerifyReward) -> None:
    from math_verify import parse, verify

    pairs = [(f"${a}/{b}$", f"$\\frac{{{c}}}{{{d}}}$") for a in (1, 2) for b in (2, 3) for c in (1, 2) for d in (2, 4)]
    expected = [float(verify(parse(gold), parse(answer))) for gold, answer in pairs]
    assert score(reward, pairs).values == expected
    assert 0 < sum(expected) < len(expected)


def test_a_gold_answer_that_cannot_be_read_is_no_wrong_answer(reward: MathVerifyReward) -> None:
    scores = score(reward, [("hello there my friend", "3"), ("", "3"), ("3", "3")])
    assert scores.values == [None, None, 1.0]
    assert "cannot read the dataset's answer 'hello there my friend'" in scores.errors[0]
    assert set(scores.errors) == {0, 1}


def test_it_works_off_the_main_thread(reward: MathVerifyReward) -> None:
    outcome: list[Scores] = []
    thread = threading.Thread(target=lambda: outcome.append(score(reward, [("1/2", "0.5"), ("1/2", "x")])))
    thread.start()
    thread.join()
    assert outcome[0].values == [1.0, 0.0]


def test_the_solution_column_and_a_missing_one(reward: MathVerifyReward) -> None:
    assert score(reward, [("2", "2")], column="solution").values == [1.0]
    with pytest.raises(RewardError, match=r"'answer' .or 'solution'.; not among the columns: gold"):
        reward.check_columns(["gold"])


@pytest.mark.slow
def test_an_answer_that_takes_for_ever_earns_nothing(reward: MathVerifyReward) -> None:
    scores = score(reward, [("2", "$9^{9^{9^{9^{9}}}}$"), ("2", "$2$"), ("3", "((((" * 20_000), ("3", "3")])
    assert scores.values == [0.0, 1.0, 0.0, 1.0]
    assert not scores.errors


def test_a_worker_ends_its_processes() -> None:
    worker = RewardWorker("math_verify")
    (reward,) = worker.rewards
    assert isinstance(reward, MathVerifyReward)
    score(reward, [("1", "1")])
    slots = [slot.process for slot in reward._pool._executor._idle]
    assert slots
    assert all(slot.poll() is None for slot in slots)
    asyncio.run(worker.close())
    assert all(slot.poll() is not None for slot in slots)


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RewardError, match=r"pip install 'mrl\[math-verify\]'"):
        resolve_rewards("math_verify")
