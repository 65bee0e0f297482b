"""What `@evaluation_test` takes: Eval Protocol's parameters, with its meanings."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from mrl.errors import ConfigError
from mrl.evaltests.loaders import Adapter, EvaluationDataLoader, Preprocess, Rows, default_dataset_adapter
from mrl.evaltests.results import EvaluationThreshold

Mode = Literal["pointwise", "groupwise", "all"]
AggregationMethod = Literal["mean", "max", "min", "bootstrap"]
CompletionParams = dict[str, Any]


@dataclass(frozen=True)
class Parameters:
    """Of one test, checked."""

    completion_params: list[CompletionParams] = field(default_factory=lambda: [{}])
    """Each is an experiment of its own; in mode groupwise they are attempted together."""
    input_messages: list[Any] | None = None
    input_dataset: list[str] | None = None
    input_rows: list[Rows] | None = None
    data_loaders: list[EvaluationDataLoader] | None = None
    dataset_adapter: Adapter = default_dataset_adapter
    rollout_processor: Any = None
    """None = a single turn."""
    evaluation_test_kwargs: list[dict[str, Any]] = field(default_factory=lambda: [{}])
    rollout_processor_kwargs: dict[str, Any] = field(default_factory=dict)
    aggregation_method: AggregationMethod = "mean"
    passed_threshold: EvaluationThreshold | None = None
    num_runs: int = 1
    filtered_row_ids: list[str] | None = None
    max_dataset_rows: int | None = None
    mcp_config_path: str | None = None
    max_concurrent_rollouts: int = 96
    max_concurrent_evaluations: int = 96
    server_script_path: str | None = None
    steps: int = 30
    mode: Mode = "pointwise"
    combine_datasets: bool = True
    preprocess_fn: Preprocess | None = None
    exception_handler_config: Any = None
    logger: Any = None

    @classmethod
    def checked(cls, given: Mapping[str, Any], who: str) -> Parameters:
        """who: the test, for messages. Raises ConfigError naming the parameter."""
        values = {name: value for name, value in given.items() if value is not None}
        if "completion_params" in values:
            values["completion_params"] = [one or {} for one in _several(values, "completion_params", who, dict)]
        for name, kind in (("evaluation_test_kwargs", dict), ("input_dataset", str)):
            if name in values:
                values[name] = [{} if one is None else one for one in _several(values, name, who, kind)]
        if isinstance(values.get("data_loaders"), EvaluationDataLoader):
            values["data_loaders"] = [values["data_loaders"]]
        for name in ("data_loaders", "input_rows", "input_messages"):
            if name in values:
                values[name] = list(values[name])
        if "passed_threshold" in values:
            values["passed_threshold"] = threshold(values["passed_threshold"], who)
        made = replace(cls(), **values)
        made._check(who)
        return made

    def overridden(self) -> Parameters:
        """With what Eval Protocol's environment variables say (EP_NUM_RUNS, EP_MAX_DATASET_ROWS, EP_PASSED_THRESHOLD,
        EP_MAX_CONCURRENT_ROLLOUTS, EP_MAX_CONCURRENT_EVALUATIONS, EP_INPUT_PARAMS_JSON). Raises ConfigError."""
        changes: dict[str, Any] = {}
        for name, variable in (
            ("num_runs", "EP_NUM_RUNS"),
            ("max_dataset_rows", "EP_MAX_DATASET_ROWS"),
            ("max_concurrent_rollouts", "EP_MAX_CONCURRENT_ROLLOUTS"),
            ("max_concurrent_evaluations", "EP_MAX_CONCURRENT_EVALUATIONS"),
        ):
            if (text := os.environ.get(variable)) and text.lower() not in ("none", "all"):
                changes[name] = _whole(text, variable)
        if text := os.environ.get("EP_PASSED_THRESHOLD"):
            try:
                changes["passed_threshold"] = threshold(float(text), "EP_PASSED_THRESHOLD")
            except ValueError:
                raise ConfigError(f"EP_PASSED_THRESHOLD: {text!r} is no number") from None
        if text := os.environ.get("EP_INPUT_PARAMS_JSON"):
            try:
                extra = json.loads(text)
            except ValueError as error:
                raise ConfigError(f"EP_INPUT_PARAMS_JSON: is no JSON ({error})") from None
            if not isinstance(extra, dict):
                raise ConfigError('EP_INPUT_PARAMS_JSON: has to be an object, e.g. {"temperature": 0}')
            changes["completion_params"] = [_deep(one, extra) for one in self.completion_params]
        return replace(self, **changes)

    def _check(self, who: str) -> None:
        inputs = [
            name
            for name in ("input_dataset", "input_messages", "input_rows", "data_loaders")
            if getattr(self, name) is not None
        ]
        if len(inputs) != 1:
            said = "none of them is given" if not inputs else f"{' and '.join(inputs)} are given"
            raise ConfigError(
                f"{who}: {said}; the rows come from one of input_dataset, input_messages, input_rows, data_loaders"
            )
        if not getattr(self, inputs[0]) or not self.completion_params or not self.evaluation_test_kwargs:
            empty = inputs[0] if not getattr(self, inputs[0]) else "completion_params or evaluation_test_kwargs"
            raise ConfigError(f"{who}: {empty} is an empty list; it has one entry for each experiment")
        for loader in self.data_loaders or []:
            if not callable(getattr(loader, "load", None)):
                raise ConfigError(f"{who}: data_loaders has {loader!r}, which has no method `load`")
        if self.preprocess_fn is not None and self.data_loaders is not None:
            raise ConfigError(f"{who}: preprocess_fn: data loaders have one of their own; give it to them")
        for name, known in (("mode", get_args(Mode)), ("aggregation_method", get_args(AggregationMethod))):
            if getattr(self, name) not in known:
                raise ConfigError(f"{who}: {name}: {getattr(self, name)!r} is none of {', '.join(known)}")
        for name in ("num_runs", "max_concurrent_rollouts", "max_concurrent_evaluations", "steps"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{who}: {name}: {value!r} is no number of them; use 1 or more")
        for kwargs in self.evaluation_test_kwargs:
            if taken := {"row", "rows"} & set(kwargs):
                raise ConfigError(f"{who}: evaluation_test_kwargs: {taken.pop()!r} is what the test gets anyway")


def threshold(given: Any, who: str) -> EvaluationThreshold:
    """Of a number, a dict or one of Eval Protocol's. Raises ConfigError."""
    if isinstance(given, bool) or not isinstance(given, int | float | Mapping | EvaluationThreshold):
        dump: Callable[[], Any] | None = getattr(given, "model_dump", None)
        if dump is None:
            raise ConfigError(f"{who}: passed_threshold: {given!r} is no number, and no success with standard_error")
        given = dump()
    if isinstance(given, EvaluationThreshold):
        return given
    try:
        return EvaluationThreshold.model_validate(given if isinstance(given, Mapping) else {"success": given})
    except ValueError as error:
        raise ConfigError(f"{who}: passed_threshold: {error}") from None


def _several(values: dict[str, Any], name: str, who: str, kind: type) -> list[Any]:
    given = values[name]
    if isinstance(given, str | Mapping) or not isinstance(given, Sequence):
        raise ConfigError(f"{who}: {name}: is a list, one entry for each experiment; write [{given!r:.60}]")
    for one in given:
        if one is not None and not isinstance(one, kind):
            raise ConfigError(f"{who}: {name}: has {one!r:.60}, of type {type(one).__name__}; it has {kind.__name__}s")
    return list(given)


def _whole(text: str, variable: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise ConfigError(f"{variable}: {text!r} is no number of them; use 1 or more")
    return value


def _deep(into: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    merged = dict(into)
    for name, value in extra.items():
        both = isinstance(value, dict) and isinstance(merged.get(name), dict)
        merged[name] = _deep(merged[name], value) if both else value
    return merged
