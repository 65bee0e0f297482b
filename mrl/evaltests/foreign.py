"""Tests that were written for Eval Protocol, used as they are: its decorator leaves its parameters on the function."""

from __future__ import annotations

from typing import Any

from mrl.evaltests.loaders import Adapter, default_dataset_adapter
from mrl.evaltests.parameters import Parameters
from mrl.evaltests.rows import EvaluationRow
from mrl.evaltests.test import Converter, EvaluationTest

MARK = "__ep_params__"


class ForeignRows(Converter):
    """Between our rows and those of eval_protocol, by their JSON."""

    def to_its(self, rows: list[EvaluationRow]) -> list[Any]:
        from eval_protocol.models import EvaluationRow as Theirs

        return [Theirs.model_validate_json(row.model_dump_json()) for row in rows]

    def from_its(self, rows: list[Any]) -> list[EvaluationRow]:
        return [
            row if isinstance(row, EvaluationRow) else EvaluationRow.model_validate_json(row.model_dump_json())
            for row in rows
        ]

    def adapter(self, adapter: Any) -> Adapter:
        if getattr(adapter, "__module__", "").startswith("eval_protocol.pytest.default_dataset_adapter"):
            return default_dataset_adapter  # the same, which takes other datasets' columns too
        return super().adapter(adapter)


def is_foreign(value: Any) -> bool:
    """Whether it is a test of eval_protocol's decorator."""
    return callable(value) and getattr(value, MARK, None) is not None and not isinstance(value, EvaluationTest)


def adopted(value: Any) -> EvaluationTest:
    """The test as one of ours. Raises ConfigError for parameters that do not go together."""
    theirs = getattr(value, MARK)
    given = theirs if isinstance(theirs, dict) else dict(vars(theirs))
    known = {name: given[name] for name in Parameters.__dataclass_fields__ if given.get(name) is not None}
    function = getattr(value, "_origin_func", value)
    loaders = known.get("data_loaders")
    if loaders is not None and not isinstance(loaders, list | tuple):
        known["data_loaders"] = [loaders]
    return EvaluationTest(function, Parameters.checked(known, f"evaluation_test {function.__name__}"), ForeignRows())
