"""A user's reward function as a `Reward`, with TRL's contract.

It is called with keyword arguments `prompts`, `completions`, `completion_ids`, every dataset column (lists, one value
per row), `trainer_state`, `log_extra(column, values)` and `log_metric(name, value)`, and returns one number or `None`
per row. Without `**kwargs` it gets only what its signature names.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dis
import inspect
import math
import numbers
import threading
import traceback
import types
import warnings
from collections.abc import Callable, Iterable
from decimal import Decimal
from pathlib import Path
from typing import Any

from mrl.data.images import opened
from mrl.errors import RewardError
from mrl.rewards.base import RewardRequest, Scores

PROVIDED = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
_NOT_COLUMNS = {"prompt", "completion", *PROVIDED}


class FunctionReward:
    """A synchronous function runs in a thread of its own, an asynchronous one on the event loop."""

    bounded = True

    def __init__(self, function: Callable[..., Any], name: str | None = None, timeout: float | None = 60.0) -> None:
        """timeout: seconds for one call; `None` = no limit."""
        self.function = function
        self.name = name or function_name(function)
        self.timeout = timeout
        self._accepted, self._required = _parameters(function, self.name)
        self._warned = False

    @property
    def asynchronous(self) -> bool:
        """Whether it runs on the event loop."""
        return _is_async(self.function)

    @property
    def logged(self) -> tuple[str, ...] | None:
        """None = it may log metrics of any name; () = it never reads `log_metric`."""
        takes = _reads_rest(self.function) if self._accepted is None else "log_metric" in self._accepted
        return None if takes else ()

    def check_columns(self, columns: Iterable[str]) -> None:
        """Raises RewardError when the function has a required parameter that nothing fills."""
        available = sorted(set(columns) - _NOT_COLUMNS)
        for parameter in self._required:
            if parameter not in PROVIDED and parameter not in available:
                raise RewardError(
                    f"reward_funcs: {self.name} needs {parameter!r}, which is neither a dataset column"
                    f" ({', '.join(available) or 'there are none'}) nor passed by mrl ({', '.join(PROVIDED)});"
                    " rename the parameter or the column, or give it a default"
                )

    async def score(self, requests: list[RewardRequest], *, trainer_state: Any) -> Scores:
        """Call the function once for the batch. Raises RewardError when what it returns breaks the contract."""
        log = _Log(self.name, len(requests))
        arguments = self._arguments(requests, trainer_state, log)
        deadline = asyncio.timeout(self.timeout)
        try:
            async with deadline:
                returned = await self._call(arguments)
        except RewardError:
            raise
        except Exception as error:
            if not deadline.expired():
                return Scores.failed(len(requests), self._describe(error))
            self._warn_of_thread()
            return Scores.failed(len(requests), f"{self.name}: no result within {self.timeout:g} s (reward_timeout)")
        values, errors = read_values(returned, len(requests), self.name)
        return Scores(values, errors, log.extra, log.metrics)

    def _arguments(self, requests: list[RewardRequest], trainer_state: Any, log: _Log) -> dict[str, Any]:
        names = dict.fromkeys(name for request in requests for name in request.columns if name not in _NOT_COLUMNS)
        arguments: dict[str, Any] = {
            name: [opened(request.columns.get(name)) for request in requests] for name in names
        }
        arguments |= {
            "prompts": [opened(request.prompt) for request in requests],
            "completions": [opened(request.completion) for request in requests],
            "completion_ids": [request.completion_ids for request in requests],
            "trainer_state": trainer_state,
            "log_extra": log.log_extra,
            "log_metric": log.log_metric,
        }
        if self._accepted is None:
            return arguments
        return {name: value for name, value in arguments.items() if name in self._accepted}

    async def _call(self, arguments: dict[str, Any]) -> Any:
        try:
            if _is_async(self.function):
                return await self.function(**arguments)
            returned = await _in_thread(self.function, arguments)
            return await returned if inspect.isawaitable(returned) else returned
        except SystemExit as error:  # would end the event loop
            raise _Exit from error

    def _describe(self, error: BaseException) -> str:
        error = error.__cause__ if isinstance(error, _Exit) and error.__cause__ else error
        text = f"{self.name} raised {type(error).__name__}: {error}".rstrip(": ")
        where = _user_line(error, self.function)
        return f"{text} ({where})" if where else text

    def _warn_of_thread(self) -> None:
        if not self._warned and not _is_async(self.function):
            self._warned = True
            warnings.warn(
                f"reward function {self.name} did not return within {self.timeout:g} s; Python cannot stop its thread,"
                " which goes on using this process until it returns",
                RuntimeWarning,
                stacklevel=2,
            )


def read_values(returned: Any, count: int, name: str) -> tuple[list[float | None], dict[int, str]]:
    """The values of a batch and the rows whose value is no finite number.

    Raises RewardError when `returned` is not one value per row: one number is never spread over a batch.
    """
    if hasattr(returned, "tolist"):  # numpy, torch, pandas
        if getattr(returned, "ndim", 1) != 1:
            raise RewardError(f"{name} returned an array of shape {tuple(returned.shape)}, expected shape ({count},)")
        returned = returned.tolist()
    if not isinstance(returned, list | tuple):
        raise RewardError(
            f"{name} returned {_short(returned)} ({type(returned).__name__}), expected a list of {count} numbers or"
            " None, one per completion"
        )
    if len(returned) != count:
        raise RewardError(f"{name} returned {len(returned)} values, expected {count}: one per completion")
    values: list[float | None] = []
    errors: dict[int, str] = {}
    for row, item in enumerate(returned):
        value = _number(item)
        values.append(value)
        if value is None and item is not None:
            errors[row] = f"{name} gave {_short(item)}, not a finite number"
    return values, errors


def function_name(function: Callable[..., Any]) -> str:
    """What a function is called in logs: its name, also behind `functools.partial` and for callable objects."""
    inner = getattr(function, "func", function)
    name = getattr(inner, "__name__", None) or type(inner).__name__
    return "lambda" if name == "<lambda>" else name


class _Exit(Exception):
    """A function called `sys.exit`."""


class _Log:
    """`log_extra` and `log_metric` of one call."""

    def __init__(self, name: str, count: int) -> None:
        self.extra: dict[str, list[Any]] = {}
        self.metrics: dict[str, list[float]] = {}
        self._name, self._count = name, count

    def log_extra(self, column: str, values: Any) -> None:
        """A column for the table of completions: one value per row."""
        values = list(values) if not isinstance(values, str) else values
        if isinstance(values, str) or len(values) != self._count:
            got = "a string" if isinstance(values, str) else f"{len(values)} values"
            raise RewardError(
                f"{self._name}: log_extra({column!r}, …) got {got}, expected {self._count}: one per completion"
            )
        self.extra[column] = values

    def log_metric(self, name: str, value: Any) -> None:
        """A number for the run's metrics; the mean of all calls is kept. NaN stays NaN."""
        value = value.item() if hasattr(value, "item") else value
        if not isinstance(value, numbers.Real):
            raise RewardError(f"{self._name}: log_metric({name!r}, …) got {_short(value)}, expected a number")
        self.metrics.setdefault(name, []).append(float(value))


async def _in_thread(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """As `asyncio.to_thread`, but in a daemon thread: one that hangs does not keep the process from ending."""
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
            result = context.run(function, **arguments)
        except SystemExit as stop:
            error = _Exit()
            error.__cause__ = stop
        except StopIteration as stop:  # a future cannot hold one
            error = RuntimeError(f"StopIteration: {stop}").with_traceback(stop.__traceback__)
        except BaseException as caught:
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop was closed after a time-out: nobody waits
            loop.call_soon_threadsafe(resolve, result, error)

    threading.Thread(target=work, name=f"reward-{function_name(function)}", daemon=True).start()
    return await future


def _is_async(function: Callable[..., Any]) -> bool:
    inner = getattr(function, "func", function)
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(getattr(inner, "__call__", None))  # noqa: B004


def _parameters(function: Callable[..., Any], name: str) -> tuple[set[str] | None, list[str]]:
    """Names it accepts (`None` = any) and names it cannot do without."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # builtins without a signature
        return None, []
    for parameter in parameters:
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            raise RewardError(f"reward_funcs: {name} takes {parameter.name!r} by position only; make it a keyword")
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    required = [p.name for p in named if p.default is p.empty]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None, required
    return {p.name for p in named}, required


def _code(function: Callable[..., Any]) -> types.CodeType | None:
    inner = getattr(function, "func", function)
    return getattr(inner, "__code__", None) or getattr(getattr(type(inner), "__call__", None), "__code__", None)  # noqa: B004


def _reads_rest(function: Callable[..., Any]) -> bool:
    """Whether a function with `**kwargs` can reach `log_metric`: by its name, or by reading `kwargs` at all."""
    code = _code(function)
    if code is None or not code.co_flags & inspect.CO_VARKEYWORDS:  # nothing to look at, or a decorator's signature
        return True
    named = code.co_argcount + code.co_kwonlyargcount
    rest = code.co_varnames[named + bool(code.co_flags & inspect.CO_VARARGS)]
    if "log_metric" in code.co_varnames[:named] or rest in code.co_cellvars:
        return True
    loads = (step.argval for step in dis.get_instructions(code) if step.opname.startswith("LOAD"))
    return any(rest in (names if isinstance(names, tuple) else (names,)) for names in loads)


def _number(item: Any) -> float | None:
    if not isinstance(item, numbers.Real) and hasattr(item, "item") and getattr(item, "size", 1) != 0:
        try:
            item = item.item()
        except (TypeError, ValueError, RuntimeError):
            return None
    if not isinstance(item, numbers.Real | Decimal):
        return None
    try:
        value = float(item)
    except (OverflowError, ValueError):  # an int beyond floats, a signalling NaN
        return None
    return value if math.isfinite(value) else None


def _user_line(error: BaseException, function: Callable[..., Any]) -> str:
    """`file:line: source` where the error left the user's code: the last frame in the function's own file."""
    code = _code(function)
    if code is None:
        return ""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == code.co_filename]
    if not frames:
        return ""
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line}"


def _short(item: Any) -> str:
    text = repr(item)
    return text if len(text) <= 80 else text[:77] + "..."
