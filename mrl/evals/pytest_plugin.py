"""`pytest my_eval.py`: functions with `@evaluation_test` as tests.

It is loaded in every run of pytest where mrl is installed, so it imports nothing until there is such a function.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from mrl.evals.report import TestReport
    from mrl.evaltests.test import EvaluationTest

TESTS = "mrl.evaltests.test"
"""Where the decorator is: before somebody has imported it there is no such function."""
FOREIGN = "eval_protocol.pytest.evaluation_test"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The model, and options of mrl's by name."""
    group = parser.getgroup("mrl", "evaluation tests")
    group.addoption(
        "--mrl-model",
        help="what evaluation tests are run against: an address (http://HOST/v1), a checkpoint's folder, a Hub id, or "
        "a run by name (RUN, RUN@best); without it, what their completion_params name",
    )
    group.addoption(
        "--mrl-option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of mrl's, e.g. temperature=0 or engine=vllm; several times for several",
    )
    group.addoption("--mrl-no-record", action="store_true", help="do not write evaluations to the runs' folder")


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(
    collector: pytest.Module | pytest.Class, name: str, obj: object
) -> list[EvaluationItem] | None:
    """An item for each combination of a test's parameters. None = it is no evaluation test."""
    if TESTS not in sys.modules and FOREIGN not in sys.modules:
        return None
    test = _as_test(obj, collector.config)
    if test is None:
        return None
    return [
        EvaluationItem.from_parent(
            collector, name=f"{name}[{one.name}]" if one.name else name, test=test, experiment=one.name
        )
        for one in test.experiments()
    ]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """The tables, below everything else."""
    reports: list[TestReport] = config.stash.get(REPORTS, [])
    if not reports:
        return
    from rich.console import Console

    from mrl.evals.table import print_reports

    terminalreporter.section("evaluation tests")
    terminalreporter.flush()
    file = terminalreporter._tw._file
    print_reports(reports, Console(file=file, width=terminalreporter._tw.fullwidth, highlight=False))


REPORTS = pytest.StashKey[list[Any]]()


class EvaluationItem(pytest.Item):
    """One experiment of a test."""

    def __init__(self, *, test: EvaluationTest, experiment: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.test, self.experiment = test, experiment
        self.own_markers.extend(mark for mark in test.pytestmark if mark.name != "parametrize")

    def runtest(self) -> None:
        """Raises EvaluationFailed below the threshold, and MRLError for what cannot be run at all."""
        from mrl.evals.running import run_test

        reports = asyncio.run(
            run_test(
                self.test,
                model=self.config.getoption("--mrl-model"),
                options=options_of(self.config.getoption("--mrl-option")),
                only=self.experiment,
                record=not self.config.getoption("--mrl-no-record"),
                note=lambda message: print(f"note: {message}", file=sys.stderr),
            )
        )
        self.config.stash.setdefault(REPORTS, []).extend(reports)
        if failures := [f"{report.model}: {report.failure}" for report in reports if report.failure]:
            raise EvaluationFailed("\n".join(failures))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """A sentence, where nothing in the test's code is wrong."""
        from mrl.errors import MRLError

        if isinstance(excinfo.value, EvaluationFailed | MRLError):
            return f"{self.test.name}: {excinfo.value}"
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        """Where the function is."""
        code = getattr(self.test.function, "__code__", None)
        return self.path, None if code is None else code.co_firstlineno - 1, self.name


class EvaluationFailed(AssertionError):
    """Below the threshold, or nothing could be scored."""


def options_of(given: list[str]) -> dict[str, Any]:
    """`NAME=VALUE`, values as in YAML. Raises ConfigError."""
    import yaml

    from mrl.config import flat_fields
    from mrl.config.section import unknown_option
    from mrl.errors import ConfigError

    options: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals:
            raise ConfigError(f"--mrl-option: {text!r} is not of the form NAME=VALUE, e.g. temperature=0")
        if name not in flat_fields():
            raise ConfigError(f"--mrl-option: {unknown_option(name, name, list(flat_fields()))}")
        options[name] = yaml.safe_load(value)
    return options


def _as_test(value: object, config: pytest.Config) -> EvaluationTest | None:
    """Ours; one of eval_protocol's where a model of mrl's is asked for, else that package runs it itself."""
    from mrl.evaltests.find import as_test
    from mrl.evaltests.test import EvaluationTest

    if isinstance(value, EvaluationTest):
        return value
    return as_test(value) if config.getoption("--mrl-model") else None
