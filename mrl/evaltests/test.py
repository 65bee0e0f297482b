"""`@evaluation_test`: a function that scores rollouts, and all that is needed to make them."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mrl.errors import ConfigError, DataError
from mrl.evaltests.loaders import (
    Adapter,
    Preprocess,
    Rows,
    adapted,
    default_dataset_adapter,
    read_dataset,
    row_of_messages,
)
from mrl.evaltests.parameters import AggregationMethod, CompletionParams, Mode, Parameters
from mrl.evaltests.rows import EvaluationRow, content_id

Scoring = Callable[..., Any]
"""(row) -> row, or (rows) -> rows; asynchronous where it likes."""


@dataclass(frozen=True)
class Experiment:
    """One combination of a test's parameters."""

    name: str
    """Tells it from the others; "" where there is one only."""
    rows: Callable[[], Rows]
    """Loads them, each with an id. Raises DataError."""
    completion_params: list[CompletionParams]
    """One; in mode groupwise all of them."""
    kwargs: dict[str, Any]
    """For the function, beside the rows."""


class EvaluationTest:
    """A function with its parameters. Called with a row (pointwise) or rows, it scores them."""

    __test__ = False  # of the class; its instances are collected by the plugin

    def __init__(self, function: Scoring, parameters: Parameters, convert: Converter | None = None) -> None:
        """convert: rows into those that the function takes, and back."""
        self.function, self.params, self.convert = function, parameters, convert or Converter()
        self.name = getattr(function, "__name__", type(function).__name__)
        functools.update_wrapper(self, function)
        self.pytestmark = list(getattr(function, "pytestmark", []))

    @property
    def mode(self) -> Mode:
        """What it is called with: a row, the attempts at a row, or all rows."""
        return self.params.mode

    def __call__(self, *args: Any, **kwargs: Any) -> Awaitable[Any]:
        """Score by hand: `await test(row)`, `await test(rows)`."""
        return self._scored(*args, **kwargs)

    async def _scored(self, *args: Any, **kwargs: Any) -> Any:
        scored = self.function(*args, **kwargs)
        return await scored if inspect.isawaitable(scored) else scored

    def experiments(self) -> list[Experiment]:
        """Every combination of its inputs, completion_params and evaluation_test_kwargs. Raises ConfigError."""
        params = self._parametrized(self.params.overridden())
        inputs = self._inputs(params)
        groups = [params.completion_params] if params.mode == "groupwise" else [[p] for p in params.completion_params]
        made = []
        for number, load in enumerate(inputs):
            for which, group in enumerate(groups):
                for at, kwargs in enumerate(params.evaluation_test_kwargs):
                    parts = [str(group[0].get("model") or f"params{which}")] if len(groups) > 1 else []
                    parts += [f"input{number}"] if len(inputs) > 1 else []
                    parts += [f"kwargs{at}"] if len(params.evaluation_test_kwargs) > 1 else []
                    made.append(Experiment("-".join(parts), load, group, kwargs))
        names = [one.name for one in made]
        if len(set(names)) == len(names):
            return made
        return [replace(one, name=f"{one.name}-{number}") for number, one in enumerate(made)]

    def training_rows(self) -> Rows:
        """The rows of all its inputs. Raises ConfigError where several evaluation_test_kwargs give several scores."""
        params = self.params.overridden()
        if len(params.evaluation_test_kwargs) > 1:
            raise ConfigError(
                f"evaluation_test {self.name}: it has {len(params.evaluation_test_kwargs)} evaluation_test_kwargs, and "
                "with that many scores; training takes one: make a test for it"
            )
        rows = [row for load in self._inputs(params) for row in load()]
        return _distinct(rows)

    def rows_of(self, given: Any) -> Rows:
        """Other rows for the same test: a dataset's name, whose rows its dataset_adapter makes, or rows.

        Raises DataError.
        """
        whole = replace(self.params, filtered_row_ids=None, max_dataset_rows=None)
        if isinstance(given, str):
            return self._prepared(functools.partial(self._read, [given], whole), whole)
        return self._prepared(functools.partial(self._copied, given), whole)

    def recorded(self) -> str:
        """As a recipe names it, where it is at a module's top."""
        return name_of(self) or f"<{self.function.__module__}.{self.function.__qualname__}>"

    # --- inner ------------------------------------------------------------------------------------------------------

    def _parametrized(self, params: Parameters) -> Parameters:
        """With the completion_params of a `pytest.mark.parametrize`, where the test has one."""
        for mark in self.pytestmark:
            if mark.name == "parametrize" and mark.args and mark.args[0] == "completion_params":
                return replace(params, completion_params=[dict(one) for one in mark.args[1]])
        return params

    def _inputs(self, params: Parameters) -> list[Callable[[], Rows]]:
        """What loads the rows, once for each experiment's."""
        if params.input_dataset is not None:
            together = [params.input_dataset] if params.combine_datasets else [[one] for one in params.input_dataset]
            raw: list[Callable[[], Rows]] = [functools.partial(self._read, names, params) for names in together]
        elif params.input_messages is not None:
            raw = [functools.partial(_conversations, one) for one in params.input_messages]
        elif params.input_rows is not None:
            raw = [functools.partial(self._copied, one) for one in params.input_rows]
        else:
            raw = [functools.partial(self._loaded, loader) for loader in params.data_loaders or []]
        return [functools.partial(self._prepared, load, params) for load in raw]

    def _prepared(self, load: Callable[[], Rows], params: Parameters) -> Rows:
        try:
            rows = load()
        except (ValueError, TypeError) as error:
            raise DataError(f"{self.name}: its rows cannot be read: {error}") from error
        rows = rows[: params.max_dataset_rows]
        if params.filtered_row_ids is not None:
            rows = [row for row in rows if row.input_metadata.row_id in params.filtered_row_ids]
        if params.preprocess_fn is not None:
            rows = self.convert.from_its(params.preprocess_fn(self.convert.to_its(rows)))
        if not rows:
            raise DataError(f"{self.name}: there are no rows")
        return _distinct(rows)

    def _read(self, names: list[str], params: Parameters) -> Rows:
        adapter = self.convert.adapter(params.dataset_adapter)
        found: list[dict[str, Any]] = []
        for name in names:
            left = None if params.max_dataset_rows is None else params.max_dataset_rows - len(found)
            if left != 0:
                found += read_dataset(self._beside(name), left)
        return adapted(found, adapter, f"{self.name}: {', '.join(names)}")

    def _beside(self, name: str) -> str:
        """A dataset's file is looked for in the current folder, and then in that of the test."""
        file = getattr(sys.modules.get(self.function.__module__), "__file__", None)
        if file is None or Path(name).expanduser().exists():
            return name
        beside = Path(file).resolve().parent / name
        return str(beside) if beside.is_file() else name

    def _copied(self, rows: Any) -> Rows:
        return [row.model_copy(deep=True) for row in self.convert.from_its(list(rows))]

    def _loaded(self, loader: Any) -> Rows:
        return [row for result in loader.load() for row in self.convert.from_its(result.rows)]


class Converter:
    """Between our rows and those of the function, which are the same here."""

    def to_its(self, rows: Rows) -> list[Any]:
        """As the function takes them."""
        return rows

    def from_its(self, rows: list[Any]) -> Rows:
        """What it returned."""
        return rows

    def adapter(self, adapter: Any) -> Adapter:
        """A dataset_adapter of its own as one that gives our rows."""
        return lambda rows: self.from_its(adapter(rows))


def evaluation_test(
    *,
    completion_params: Sequence[CompletionParams | None] | None = None,
    input_messages: Sequence[Any] | None = None,
    input_dataset: Sequence[str] | None = None,
    input_rows: Sequence[list[EvaluationRow]] | None = None,
    data_loaders: Any = None,
    dataset_adapter: Adapter = default_dataset_adapter,
    rollout_processor: Any = None,
    evaluation_test_kwargs: Sequence[dict[str, Any] | None] | None = None,
    rollout_processor_kwargs: dict[str, Any] | None = None,
    aggregation_method: AggregationMethod = "mean",
    passed_threshold: Any = None,
    num_runs: int = 1,
    filtered_row_ids: Sequence[str] | None = None,
    max_dataset_rows: int | None = None,
    mcp_config_path: str | None = None,
    max_concurrent_rollouts: int = 96,
    max_concurrent_evaluations: int = 96,
    server_script_path: str | None = None,
    steps: int = 30,
    mode: Mode = "pointwise",
    combine_datasets: bool = True,
    preprocess_fn: Preprocess | None = None,
    exception_handler_config: Any = None,
    disable_browser_open: bool = True,
    logger: Any = None,
) -> Callable[[Scoring], EvaluationTest]:
    """A function that scores rollouts as a test, a benchmark and what a model is trained on.

    completion_params: what a model is asked with (`model`, `temperature`, `max_tokens`, `base_url` …), each an
        experiment. input_messages: conversations, a list of them for each experiment. input_dataset: JSONL files or Hub
        ids, of which dataset_adapter makes rows. input_rows: rows, a list for each experiment. data_loaders: instead.
    rollout_processor: who makes the rollouts; None = one answer to each row. steps: turns of it at most.
    mode: `pointwise`: called with each row; `groupwise`: with the attempts at a row; `all`: with every row.
    evaluation_test_kwargs: further arguments of the function, each an experiment.
    num_runs: attempts at each row. aggregation_method: how the runs' scores become one. passed_threshold: what that has
        to reach (`{"success": 0.8, "standard_error": 0.02}`), or the test fails.
    max_dataset_rows, filtered_row_ids, preprocess_fn: which rows, and what is done to them before.
    mcp_config_path: MCP servers whose tools an agent has. exception_handler_config: after which errors a rollout is
        made again (`mrl.processors.retries`). rollout_processor_kwargs, server_script_path, logger: handed to
        processors of one's own. disable_browser_open: nothing is ever opened here.

    Raises ConfigError, when the module is imported, for parameters that do not go together and for a function that
    takes something else than the mode says.
    """
    given = {name: value for name, value in locals().items() if name != "disable_browser_open"}

    def decorate(function: Scoring) -> EvaluationTest:
        name = getattr(function, "__name__", type(function).__name__)
        who = f"evaluation_test {name}"
        parameters = Parameters.checked(given, who)
        check_signature(function, parameters.mode, who)
        return EvaluationTest(function, parameters)

    return decorate


def check_signature(function: Any, mode: Mode, who: str) -> None:
    """Raise ConfigError for a function that cannot be called with what the mode gives it."""
    wanted = "row" if mode == "pointwise" else "rows"
    if not callable(function):
        raise ConfigError(f"{who}: {function!r} is no function")
    if wanted not in inspect.signature(function).parameters:
        named = ", ".join(inspect.signature(function).parameters) or "nothing"
        kind = "EvaluationRow" if mode == "pointwise" else "list[EvaluationRow]"
        raise ConfigError(f"{who}: it takes {named}; with mode {mode} it takes `{wanted}: {kind}` and returns the same")


def name_of(test: EvaluationTest) -> str | None:
    """What another process finds a test by, `file.py:name`; None where it is at no module's top."""
    module = sys.modules.get(getattr(test.function, "__module__", ""))
    file = getattr(module, "__file__", None)
    at_top = getattr(module, test.name, None)
    own = at_top is test or getattr(at_top, "_origin_func", None) is test.function
    return f"{Path(file).resolve()}:{test.name}" if file is not None and own else None


def _distinct(rows: Rows) -> Rows:
    """The same rows, each with an id of its own: twice the same is two rows all the same."""
    seen: dict[str, int] = {}
    for row in rows:
        name = row.input_metadata.row_id or content_id(row)
        seen[name] = seen.get(name, 0) + 1
        row.input_metadata.row_id = name if seen[name] == 1 else f"{name}-{seen[name]}"
    return rows


def _conversations(given: Any) -> Rows:
    """Of one entry of `input_messages`: conversations, or a single one."""
    single = bool(given) and not isinstance(given[0], list | tuple)
    return [row_of_messages(one) for one in ([given] if single else given)]
