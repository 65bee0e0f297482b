"""What an evaluation test came to, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mrl.system.units import plural

if TYPE_CHECKING:
    from rich.console import Console

    from mrl.evals.report import TestReport
    from mrl.evals.stats import Interval


def print_reports(reports: Sequence[TestReport], console: Console) -> None:
    """One table for each, and below it what is in no mean."""
    for report in reports:
        _print(report, console)


def as_json(report: TestReport) -> dict[str, Any]:
    """The same as plain data."""
    found = report.found
    return {
        "test": report.test,
        "experiment": report.experiment,
        "model": report.model,
        "mode": report.mode,
        "rows": report.rows,
        "num_runs": report.runs,
        "aggregation_method": report.method,
        "score": found.score,
        "standard_error": found.standard_error,
        "confidence": report.confidence,
        "interval": _ends(found.interval),
        "interval_over_rows": _ends(found.over_tasks),
        "metrics": {name: {"mean": value.mean, "interval": _ends(value)} for name, value in report.metrics.items()},
        "passed_threshold": None if report.threshold is None else report.threshold.model_dump(),
        "passed": report.passed,
        "failure": report.failure,
        "unscored": report.unscored,
        "unscored_because": report.unscored_because,
        "seconds": report.seconds,
        "run_dir": None if report.run_dir is None else str(report.run_dir),
    }


def _print(report: TestReport, console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    named = f"{report.test}[{report.experiment}]" if report.experiment else report.test
    table = Table(title=Text(f"{named}: {report.model}"), title_justify="left")
    table.add_column("measure")
    table.add_column("value", justify="right")
    table.add_column(f"{report.confidence * 100:g}% interval", justify="right")
    found = report.found
    shown = "none" if found.score is None else f"{found.score:.3f}"
    table.add_row(f"score ({report.method})", shown, _interval(found.interval))
    if found.standard_error is not None:
        table.add_row("standard error", f"{found.standard_error:.3f}", "")
    if found.over_tasks is not None:
        table.add_row("mean over rows like these", f"{found.over_tasks.mean:.3f}", _interval(found.over_tasks))
    for name, value in report.metrics.items():
        table.add_row(Text(f"  {name}"), f"{value.mean:.3f}", _interval(value))
    console.print(table)
    parts = [f"{plural(report.rows, 'row')} x {plural(report.runs, 'run')}, {report.seconds:.1f} s"]
    if report.threshold is not None:
        also = report.threshold.standard_error
        wanted = f"{report.threshold.success:g}" + ("" if also is None else f", standard error {also:g}")
        parts.append(f"threshold {wanted}: {'passed' if report.passed else 'failed'}")
    console.print("; ".join(parts), markup=False, soft_wrap=True)
    if report.unscored:
        console.print(
            f"{report.unscored} of {report.rows * report.runs} attempts have no valid score, and are in no mean. The "
            f"first says: {report.unscored_because}",
            markup=False,
            soft_wrap=True,
        )
    if report.run_dir is not None:
        console.print(f"Everything is in {report.run_dir}/", markup=False, soft_wrap=True)


def _interval(value: Interval | None) -> str:
    return "–" if value is None or value.low is None else f"{value.low:.3f} – {value.high:.3f}"


def _ends(value: Interval | None) -> list[float] | None:
    return None if value is None or value.low is None or value.high is None else [value.low, value.high]
