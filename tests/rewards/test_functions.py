"""Reward functions: TRL's contract, and every way of breaking it."""

import asyncio
import functools
import math
import pickle
import threading
import time
import warnings
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrl.errors import RewardError
from mrl.rewards import RewardReport, RewardRequest, Scores, check_columns, resolve_rewards
from mrl.rewards.base import AttributeDict
from mrl.rewards.combine import score_rows

REQUESTS = [RewardRequest(f"r{k}", f"p{k}", f"c{k}", [k, 9], {"answer": k * 10}) for k in range(3)]


async def score(
    *functions: Any, weights: list[float] | None = None, timeout: float = 5.0, state: Any = None
) -> RewardReport:
    rewards = resolve_rewards(list(functions), weights, timeout=timeout)
    return await score_rows(rewards, REQUESTS, weights=weights, timeout=timeout, trainer_state=state)


def values(report: RewardReport) -> list[float | None]:
    return [result.reward for result in report.results]


def returns(value: Any, name: str = "fixed") -> Any:
    def function(**kwargs: Any) -> Any:
        return value

    function.__name__ = name
    return function


async def test_called_as_trl_calls():
    seen: dict[str, Any] = {}

    def everything(**kwargs: Any) -> list[float]:
        seen.update(kwargs)
        return [1.0, 2.0, 3.0]

    def some(completions: list[str], answer: list[int], level: str = "none") -> list[float]:
        return [float(c[1:]) + a for c, a in zip(completions, answer, strict=True)]

    async def later(prompts: list[str], completion_ids: list[list[int]]) -> list[float]:
        await asyncio.sleep(0)
        return [float(ids[0]) for ids in completion_ids]

    class Callable:
        async def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
            return [0.0] * len(completions)

    partial = functools.partial(some, level="x")
    report = await score(
        everything, some, later, Callable(), partial, lambda completions: [0] * 3, state={"global_step": 7}
    )
    assert [list(r.rewards.values()) for r in report.results] == [
        [1.0, 0.0, 0.0, 0.0, 0.0, 0.0],
        [2.0, 11.0, 1.0, 0.0, 11.0, 0.0],
        [3.0, 22.0, 2.0, 0.0, 22.0, 0.0],
    ]
    assert list(report.results[0].rewards) == ["everything", "some", "later", "Callable", "some_2", "lambda"]
    assert set(seen) == {
        "prompts", "completions", "completion_ids", "answer", "trainer_state", "log_extra", "log_metric"
    }  # fmt: skip
    assert (seen["prompts"], seen["completion_ids"], seen["answer"]) == (
        ["p0", "p1", "p2"], [[0, 9], [1, 9], [2, 9]], [0, 10, 20]
    )  # fmt: skip
    assert seen["trainer_state"].global_step == seen["trainer_state"]["global_step"] == 7
    assert values(report) == [pytest.approx(1 / 6), pytest.approx(25 / 6), pytest.approx(49 / 6)]


async def test_all_functions_run_at_once():
    barrier = threading.Barrier(2, timeout=4)
    ready, go = asyncio.Event(), asyncio.Event()

    def blocking(completions: list[str]) -> list[float]:
        barrier.wait()
        return [1.0] * 3

    async def first(completions: list[str]) -> list[float]:
        ready.set()
        await go.wait()
        return [1.0] * 3

    async def second(completions: list[str]) -> list[float]:
        await ready.wait()
        go.set()
        return [1.0] * 3

    assert values(await score(blocking, blocking, first, second)) == [1.0] * 3


async def test_numbers_of_every_kind():
    for value in (
        [1, True, 0.5],
        (np.float32(1), np.int64(1), torch.tensor(0.5)),
        np.array([1, 1, 0.5]),
        torch.tensor([1, 1, 0.5]),
        [Decimal(1), np.bool_(True), np.array(0.5)],
    ):
        assert values(await score(returns(value))) == [1.0, 1.0, 0.5]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (1.0, r"fixed returned 1.0 \(float\), expected a list of 3"),
        (None, r"fixed returned None"),
        ([1.0], r"fixed returned 1 values, expected 3"),
        ([1.0] * 4, r"fixed returned 4 values, expected 3"),
        ([], r"fixed returned 0 values, expected 3"),
        ("abc", r"fixed returned 'abc' \(str\)"),
        ({"a": 1}, r"\(dict\)"),
        ((x for x in (1, 2, 3)), r"\(generator\)"),
        (np.float64(1.0), r"array of shape \(\), expected shape \(3,\)"),
        (torch.ones(3, 1), r"array of shape \(3, 1\)"),
        (torch.ones(2), r"returned 2 values, expected 3"),
    ],
)
async def test_what_is_not_one_value_per_row_ends_the_run(value, message):
    with pytest.raises(RewardError, match=message):
        await score(returns([1.0] * 3, "good"), returns(value))


@pytest.mark.parametrize(
    "bad", [math.nan, math.inf, -math.inf, "1.0", [1.0], 1j, 10**400, np.nan, torch.tensor(math.nan)]
)
async def test_a_value_that_is_no_number_costs_its_row_only(bad):
    report = await score(returns([1.0, bad, 3.0]), returns([1.0] * 3, "good"))
    assert values(report) == [1.0, None, 2.0]
    error = report.results[1].error
    assert error is not None
    assert error.startswith("fixed gave ")
    assert "not a finite number" in error
    assert report.results[1].rewards == {"fixed": None, "good": 1.0}
    assert report.results[0].error is None


async def test_none_means_does_not_apply():
    report = await score(returns([None, 2.0, None], "a"), returns([4.0, 4.0, None], "b"))
    assert values(report) == [4.0, 3.0, None]
    assert [r.error for r in report.results] == [None, None, "no reward function scored it (a, b returned None)"]
    report = await score(returns([None, 2.0, None], "a"), returns([4.0, 4.0, None], "b"), weights=[0.5, 2.0])
    assert values(report) == [8.0, 9.0, None]


async def test_weights():
    report = await score(returns([1, 2, 3], "a"), returns([10, 20, 30], "b"), weights=[2.0, -0.5])
    assert values(report) == [-3.0, -6.0, -9.0]
    with pytest.raises(RewardError, match=r"reward_weights: 1 for 2 reward_funcs \(a, b\)"):
        resolve_rewards([returns(1, "a"), returns(1, "b")], [1.0])
    with pytest.raises(RewardError, match="nan for a"):
        resolve_rewards([returns(1, "a")], [math.nan])


finite = st.none() | st.floats(-1e6, 1e6)


@given(
    st.lists(st.tuples(finite, finite, finite), min_size=3, max_size=3),
    st.lists(st.floats(-10, 10), min_size=3, max_size=3),
)
def test_joining_equals_the_definition(rows, weights):
    functions = [returns([row[k] for row in rows], f"f{k}") for k in range(3)]
    mean = values(asyncio.run(score(*functions)))
    weighted = values(asyncio.run(score(*functions, weights=weights)))
    for row, average, total in zip(rows, mean, weighted, strict=True):
        there = [k for k in range(3) if row[k] is not None]
        if not there:
            assert average is None
            assert total is None
        else:
            assert average == pytest.approx(sum(row[k] for k in there) / len(there))
            assert total == pytest.approx(sum(row[k] * weights[k] for k in there))


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("error", [ValueError("bad answer"), SystemExit(1), TimeoutError("judge"), StopIteration("x")])
async def test_an_exception_costs_the_call_not_the_run(asynchronous, error):
    def fails(completions: list[str]) -> list[float]:
        raise error

    async def fails_later(completions: list[str]) -> list[float]:
        raise error

    if asynchronous and isinstance(error, StopIteration):
        error = KeyError("x")
    report = await score(fails_later if asynchronous else fails, returns([1.0] * 3, "good"))
    assert values(report) == [None] * 3
    text = report.results[2].error
    assert text is not None
    assert text.startswith(("fails raised", "fails_later raised"))
    assert type(error).__name__ in text
    assert "test_functions.py:" in text
    assert "raise error" in text
    assert report.results[2].rewards == {"fails_later" if asynchronous else "fails": None, "good": 1.0}


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_time_out(asynchronous):
    release = threading.Event()

    def hangs(completions: list[str]) -> list[float]:
        release.wait(20)
        return [1.0] * 3

    async def hangs_later(completions: list[str]) -> list[float]:
        await asyncio.sleep(20)
        return [1.0] * 3

    function = hangs_later if asynchronous else hangs
    rewards = resolve_rewards([function, returns([1.0] * 3, "good")], timeout=0.2)
    start = time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            report = await score_rows(rewards, REQUESTS)
    release.set()
    assert time.monotonic() - start < 5
    assert values(report) == [None] * 3
    assert report.results[0].error == f"{function.__name__}: no result within 0.2 s (reward_timeout)"
    assert len([w for w in caught if "cannot stop its thread" in str(w.message)]) == (0 if asynchronous else 1)


def test_a_hung_function_does_not_keep_the_loop_from_ending():
    release = threading.Event()
    start = time.monotonic()
    with pytest.warns(RuntimeWarning, match="cannot stop"):
        asyncio.run(score(lambda completions: release.wait(20), timeout=0.1))
    assert time.monotonic() - start < 5
    release.set()


async def test_log_extra_and_log_metric():
    def logs(completions, log_extra, log_metric):
        log_extra("length", [len(c) for c in completions])
        log_metric("accuracy", 0.5)
        log_metric("accuracy", torch.tensor(1.0))
        return [1.0] * 3

    async def logs_later(completions, log_extra, log_metric):
        log_extra("length", np.array([7, 8, 9]))
        log_metric("broken", math.nan)
        return [1.0] * 3

    report = await score(logs, logs_later)
    assert report.results[1].extra == {"length": 2, "logs_later/length": 8}
    assert report.metrics["accuracy"] == 0.75
    assert math.isnan(report.metrics["broken"])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda extra, metric: extra("x", [1.0]), r"logs: log_extra\('x', …\) got 1 values, expected 3"),
        (lambda extra, metric: extra("x", "abc"), r"got a string"),
        (lambda extra, metric: metric("x", [1.0]), r"log_metric\('x', …\) got \[1.0\], expected a number"),
        (lambda extra, metric: metric("x", None), r"got None"),
    ],
)
async def test_logging_has_a_contract_too(call, message):
    def logs(completions, log_extra, log_metric):
        call(log_extra, log_metric)
        return [1.0] * 3

    with pytest.raises(RewardError, match=message):
        await score(logs)


def test_signatures_are_checked_before_anything_runs():
    def needs(completions, answer, difficulty, optional=None, **kwargs): ...

    def fine(prompts, completions, completion_ids, trainer_state, log_extra, log_metric): ...

    check_columns(resolve_rewards([needs, fine]), ["answer", "difficulty"])
    with pytest.raises(
        RewardError, match=r"needs needs 'difficulty', which is neither a dataset column \(answer, level\)"
    ):
        check_columns(resolve_rewards([needs]), ["level", "answer", "prompt"])
    with pytest.raises(RewardError, match="needs 'prompt'"):
        check_columns(resolve_rewards(lambda prompt: 1), ["prompt"])

    def positional(completions, /): ...

    with pytest.raises(RewardError, match="by position only"):
        resolve_rewards(positional)


class Length:
    name = "length"

    async def score(self, requests: list[RewardRequest], *, trainer_state: Any) -> Scores:
        return Scores([float(len(r.completion)) for r in requests], {1: "length: no idea"})


async def test_rewards_of_ones_own():
    own = Length()
    report = await score(own, own, Length)
    assert list(report.results[0].rewards) == ["length", "length_2", "length_3"]
    assert own.name == "length"
    assert values(report) == [2.0, None, 2.0]

    class Slow(Length):
        async def score(self, requests, *, trainer_state):
            await asyncio.sleep(20)

    class Broken(Length):
        async def score(self, requests, *, trainer_state):
            return Scores([math.nan] * 3) if requests else Scores([])

    class Short(Length):
        async def score(self, requests, *, trainer_state):
            return Scores([1.0])

    assert "no result within 0.1 s" in str((await score(Slow(), timeout=0.1)).results[0].error)
    assert "length gave nan" in str((await score(Broken())).results[2].error)
    with pytest.raises(RewardError, match="length returned 1 values, expected 3"):
        await score(Short())


def test_trainer_state_reads_as_attributes_and_travels():
    state = AttributeDict(global_step=3)
    assert pickle.loads(pickle.dumps(state)).global_step == 3
    with pytest.raises(AttributeError, match=r"no 'epoch' \(it has: global_step\)"):
        _ = state.epoch


async def test_an_empty_batch():
    assert (await score_rows(resolve_rewards([returns([])]), [])).results == []
