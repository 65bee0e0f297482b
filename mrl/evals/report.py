"""What an evaluation test came to, and its record: a run's folder with the rollouts, and the rows beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mrl.evals.aggregate import Aggregate
from mrl.evals.stats import Interval
from mrl.evals.targets import Target
from mrl.evaltests.results import EvaluationThreshold
from mrl.evaltests.rows import EvaluationRow
from mrl.experience.metrics import rollout_metrics
from mrl.store.evaluation import write_evaluation
from mrl.types import Group

ROWS = "rows.jsonl"
"""In the folder of an evaluation: its rows, as Eval Protocol reads them."""


@dataclass
class TestReport:
    """What an experiment of a test came to, for one model."""

    __test__ = False

    test: str
    experiment: str
    """Which combination of its parameters; "" where there is one."""
    model: str
    mode: str
    rows: int
    runs: int
    """Attempts at each row."""
    found: Aggregate
    method: str
    threshold: EvaluationThreshold | None
    passed: bool | None
    """None = no threshold."""
    metrics: dict[str, Interval]
    unscored: int
    """Attempts without a valid score: they are in no mean."""
    unscored_because: str | None
    """What the first of them says."""
    errors: int
    """Of these, how many are the test's own: its function raised."""
    seconds: float
    run_dir: Path | None
    logged: dict[str, float] = field(default_factory=dict)
    done: list[EvaluationRow] = field(default_factory=list, repr=False)
    """All of them, run by run."""
    confidence: float = 0.95

    @property
    def failure(self) -> str | None:
        """Why the test fails, in a sentence; None = it does not."""
        if self.errors:
            return f"{self.errors} of {len(self.done)} rows: the test raised an exception; {self.unscored_because}"
        if self.found.score is None:
            return f"no attempt could be scored; the first says: {self.unscored_because}"
        if self.passed is False and self.threshold is not None:
            if self.found.score < self.threshold.success:
                return f"the score {self.found.score:.3f} is below the threshold {self.threshold.success:g}"
            return (
                f"the standard error {self.found.standard_error:.3f} is above the threshold "
                f"{self.threshold.standard_error:g}"
            )
        return None


def write_record(report: TestReport, target: Target, groups: list[Group]) -> Path:
    """Its rollouts and numbers as a run of their own, and its rows beside them. Raises ConfigError, StoreError."""
    metrics = rollout_metrics(groups, target.config, "eval") | report.logged
    if report.found.score is not None:
        metrics["eval/score"] = report.found.score
    if report.found.standard_error is not None:
        metrics["eval/standard_error"] = report.found.standard_error
    about = {"experiment": report.experiment, "passed": report.passed}
    folder = write_evaluation(target.config, metrics, groups, of=report.test, model=report.model, **about)
    write_rows(folder / ROWS, report.done)
    return folder


def write_rows(path: Path, rows: Sequence[EvaluationRow]) -> None:
    """One line of JSON each."""
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(row.model_dump_json() + "\n" for row in rows)


def reason(row: EvaluationRow) -> str:
    """Why a row has no valid score."""
    result = row.evaluation_result
    return str((result and (result.error or result.reason)) or "it does not say why")


def raised(row: EvaluationRow) -> bool:
    """Whether the test's function did, rather than the rollout failed or the test said that it cannot tell."""
    result = row.evaluation_result
    return result is not None and (result.reason or "").startswith("Error during evaluation: ")
