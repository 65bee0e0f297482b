"""A test called with rows: one, the attempts at one, or all; what it says, or why it said nothing."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import math
import threading
from collections.abc import Callable
from time import perf_counter
from typing import Any

from mrl.errors import RewardError
from mrl.evaltests.results import EvaluateResult
from mrl.evaltests.rows import EvaluationRow
from mrl.evaltests.status import Status
from mrl.evaltests.test import EvaluationTest


async def score_rows(
    test: EvaluationTest, groups: list[list[EvaluationRow]], kwargs: dict[str, Any], at_once: asyncio.Semaphore
) -> list[list[EvaluationRow]]:
    """The rows with their results, in the same order. groups: the attempts at one row each.

    pointwise: a call for each row; groupwise: for each group; all: one call. A call that raises gives its rows a result
    that is not valid, with the error. Raises RewardError for a function that returns something else than its rows.
    """
    if test.mode == "all":
        flat = [row for group in groups for row in group]
        scored = iter(await _call(test, flat, kwargs, at_once))
        return [[next(scored) for _ in group] for group in groups]
    if test.mode == "groupwise":
        return list(await asyncio.gather(*(_call(test, group, kwargs, at_once) for group in groups)))
    calls = [[_call(test, [row], kwargs, at_once) for row in group] for group in groups]
    done = await asyncio.gather(*(asyncio.gather(*group) for group in calls))
    return [[rows[0] for rows in group] for group in done]


async def _call(
    test: EvaluationTest, rows: list[EvaluationRow], kwargs: dict[str, Any], at_once: asyncio.Semaphore
) -> list[EvaluationRow]:
    async with at_once:
        start = perf_counter()
        theirs = test.convert.to_its(rows)
        try:
            returned = await _run(test.function, theirs[0] if test.mode == "pointwise" else theirs, kwargs)
        except RewardError:
            raise
        except Exception as error:  # the test's own, whatever it is
            return [failed(row, error) for row in rows]
        scored = _checked(test, rows, returned)
        for row in scored:
            row.execution_metadata.eval_duration_seconds = perf_counter() - start
        return scored


def failed(row: EvaluationRow, error: BaseException) -> EvaluationRow:
    """The row with a result that is not valid."""
    said = f"{type(error).__name__}: {error}".rstrip(": ")
    row.evaluation_result = EvaluateResult(
        score=0.0, is_score_valid=False, reason=f"Error during evaluation: {said}", error=said
    )
    return row


def _checked(test: EvaluationTest, rows: list[EvaluationRow], returned: Any) -> list[EvaluationRow]:
    """What it returned, in the order of the rows. Raises RewardError."""
    wanted = "an EvaluationRow" if test.mode == "pointwise" else f"a list of its {len(rows)} rows"
    listed = [returned] if test.mode == "pointwise" else returned
    if not isinstance(listed, list | tuple):
        raise RewardError(f"{test.name} returned {_short(returned)}; with mode {test.mode} it returns {wanted}")
    try:
        scored = test.convert.from_its(list(listed))
    except (AttributeError, ValueError):
        scored = [None]  # type: ignore[list-item]
    if not all(isinstance(row, EvaluationRow) for row in scored):
        raise RewardError(f"{test.name} returned {_short(returned)}; with mode {test.mode} it returns {wanted}")
    by_id = {row.execution_metadata.rollout_id: row for row in scored}
    missing = [row for row in rows if row.execution_metadata.rollout_id not in by_id]
    if len(scored) != len(rows) or missing:
        raise RewardError(
            f"{test.name} returned {len(scored)} rows, and was given {len(rows)}: it returns every one of them, in any "
            "order; for one without a score set is_score_valid=False"
        )
    ordered = [by_id[row.execution_metadata.rollout_id] for row in rows]
    for row in ordered:
        if row.evaluation_result is None:
            raise RewardError(f"{test.name} returned a row without evaluation_result; set it to an EvaluateResult")
        if not math.isfinite(row.evaluation_result.score) and row.evaluation_result.is_score_valid:
            row.evaluation_result.is_score_valid = False
            row.evaluation_result.reason = f"the score is {row.evaluation_result.score}, no finite number"
    return ordered


async def _run(function: Callable[..., Any], argument: Any, kwargs: dict[str, Any]) -> Any:
    """A plain function runs in a thread of its own, so that many can wait at a time."""
    if inspect.iscoroutinefunction(function):
        return await function(argument, **kwargs)
    returned = await _in_thread(function, argument, kwargs)
    return await returned if inspect.isawaitable(returned) else returned


async def _in_thread(function: Callable[..., Any], argument: Any, kwargs: dict[str, Any]) -> Any:
    """In a daemon thread, which keeps no process from ending. Raises what it raises; SystemExit as RuntimeError."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def resolve(result: Any, error: BaseException | None) -> None:
        if not future.done():
            future.set_exception(error) if error is not None else future.set_result(result)

    def work() -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            result = context.run(function, argument, **kwargs)
        except (SystemExit, StopIteration) as stop:  # a future cannot hold them
            error = RuntimeError(f"{type(stop).__name__}: {stop}")
        except BaseException as caught:
            error = caught
        if not loop.is_closed():
            loop.call_soon_threadsafe(resolve, result, error)

    threading.Thread(target=work, name="mrl-evaluation-test", daemon=True).start()
    return await future


def mark_finished(row: EvaluationRow) -> None:
    """Say in its eval_metadata how its evaluation ended."""
    if row.eval_metadata is None:
        return
    if row.rollout_status.is_error():
        row.eval_metadata.status = Status.error(row.rollout_status.message)
    elif row.evaluation_result is not None and not row.evaluation_result.is_score_valid:
        row.eval_metadata.status = Status.score_invalid(row.evaluation_result.reason or "Score is invalid")
    else:
        row.eval_metadata.status = Status.eval_finished()


def _short(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'}, of type {type(value).__name__}"
