"""Evaluations as the store has them: rows, scores with intervals, differences row by row, and pivot tables.

An evaluation is a step of the split `eval` in a run: the held-out tasks after a step of training, or what a run that
only evaluates wrote.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal

from mrl.evals.stats import Interval, mean_interval, mean_reward, pass_rate
from mrl.experience.groups import PASS
from mrl.logs.catalog import Catalog, RunRow
from mrl.store.read import RunReader

MOST = 60
"""Evaluations that are scored for a page."""
VALUES = {"reward": "mean reward", "pass": "pass rate", "tokens": "tokens", "failed": "share not scored"}
Change = Literal["fixed", "broke", "better", "worse", "same", "only a", "only b"]
CHANGES: tuple[Change, ...] = ("fixed", "broke", "better", "worse", "same", "only a", "only b")
"""Fixed: b passes and a did not; broke: the other way round; better and worse: otherwise."""
LEAST = 1e-9
HELD_OUT = "its held-out tasks"


@dataclass(frozen=True)
class Attempt:
    """One rollout of an evaluation."""

    task: str
    attempt: int
    reward: float | None
    tokens: int
    key: int
    error: str | None


@dataclass
class Evaluation:
    """One evaluation of one run."""

    run: str
    step: int
    model: str
    """Whom it measured, as commands name it: `RUN@STEP` of a run that trains."""
    of: str
    """On what: a test or a dataset."""
    trains: bool
    """Whether its run trains: `step` says when it was."""
    time: float
    rollouts: int
    failed: int
    attempts: list[Attempt] = field(default_factory=list)

    @property
    def id(self) -> str:
        """In links."""
        return f"{self.run}@{self.step}"

    @property
    def by_task(self) -> dict[str, list[Attempt]]:
        """In the order they were attempted."""
        found: dict[str, list[Attempt]] = defaultdict(list)
        for attempt in self.attempts:
            found[attempt.task].append(attempt)
        return found

    @property
    def reward(self) -> Interval | None:
        """Mean reward over tasks, with its 95 % interval; None where nothing could be scored."""
        return mean_reward(self._rewards()) if self.attempts else None

    @property
    def passed(self) -> Interval | None:
        """pass@1 the same way."""
        return pass_rate(self._rewards()) if self.attempts else None

    def _rewards(self) -> list[list[float | None]]:
        return [[one.reward for one in attempts] for attempts in self.by_task.values()]


def evaluations_of(rows: Iterable[RunRow]) -> list[Evaluation]:
    """Every evaluation of these runs, without its attempts."""
    found = []
    for row in rows:
        if row.evaluations:
            with RunReader(row.summary.folder) as reader:
                for step in reader.steps("eval"):
                    at, counts = step["step"], (step["time"], step["rollouts"], step["failed"])
                    model, of = row.policy or f"{row.name}@{at}", row.measured or HELD_OUT
                    found.append(Evaluation(row.name, at, model, of, row.measured is None, *counts))
    return found


def fill(catalog: Catalog, evaluations: Iterable[Evaluation]) -> None:
    """Read the attempts of these evaluations."""
    for evaluation in evaluations:
        folder = catalog.folder(evaluation.run)
        if folder is None or evaluation.attempts:
            continue
        with RunReader(folder) as reader:
            rows = reader.attempts("eval", evaluation.step)
        evaluation.attempts = [
            Attempt(task, attempt, _finite(reward), tokens, key, error)
            for task, attempt, reward, tokens, key, error in rows
        ]


@dataclass(frozen=True)
class Difference:
    """One task under two models."""

    task: str
    a: float | None
    b: float | None
    change: Change
    keys_a: list[int]
    """Of its attempts."""
    keys_b: list[int]

    @property
    def by(self) -> float | None:
        """b − a."""
        return None if self.a is None or self.b is None else self.b - self.a


def differences(a: Evaluation, b: Evaluation) -> list[Difference]:
    """Task by task, the largest changes first. A task's value is the mean of its scored attempts."""
    tasks_a, tasks_b = a.by_task, b.by_task
    found = []
    for task in dict.fromkeys([*tasks_a, *tasks_b]):
        of_a, of_b = tasks_a.get(task, []), tasks_b.get(task, [])
        value_a, value_b = _mean(of_a), _mean(of_b)
        keys = [one.key for one in of_a], [one.key for one in of_b]
        found.append(Difference(task, value_a, value_b, _change(value_a, value_b), *keys))
    return sorted(found, key=lambda one: (CHANGES.index(one.change), -abs(one.by or 0.0), one.task))


def counterpart(b: Evaluation, others: Iterable[Evaluation]) -> Evaluation | None:
    """What `b` is best compared with: the first evaluation of its run, else the newest of the same tasks."""
    found = [one for one in comparable(b, others) if one is not b]
    of_its_run = [one for one in found if one.run == b.run]
    return min(of_its_run, key=lambda one: one.step, default=max(found, key=lambda one: one.time, default=None))


def comparable(b: Evaluation, others: Iterable[Evaluation]) -> list[Evaluation]:
    """Those that have a task in common with `b`, itself included."""
    tasks = set(b.by_task)
    return [one for one in others if one is b or not tasks.isdisjoint(one.by_task)]


def pair_of(newest_first: list[Evaluation]) -> tuple[Evaluation, Evaluation] | None:
    """A and B where nobody chose: the newest that there is anything to compare with, and that."""
    for b in newest_first:
        if (a := counterpart(b, newest_first)) is not None:
            return a, b
    return (newest_first[-1], newest_first[0]) if newest_first else None


def paired(rows: Iterable[Difference]) -> Interval | None:
    """The mean of b − a over the tasks that both have, with its 95 % interval."""
    values = [by for row in rows if (by := row.by) is not None]
    return mean_interval(values, between_0_and_1=False) if values else None


def columns_of(catalog: Catalog, evaluations: Iterable[Evaluation]) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """The columns of the evaluated tasks that a pivot table can be made by, and the columns of each task."""
    tasks: dict[str, dict[str, Any]] = {}
    by_run: dict[str, list[int]] = defaultdict(list)
    for evaluation in evaluations:
        by_run[evaluation.run].append(evaluation.step)
    for run, steps in by_run.items():
        folder = catalog.folder(run)
        if folder is not None:
            with RunReader(folder) as reader:
                for task in reader.tasks_of("eval", steps):
                    tasks.setdefault(task["id"], task["columns"])
    values: dict[str, set[str]] = defaultdict(set)
    for columns in tasks.values():
        for name, value in columns.items():
            values[name].add(label(value))
    most = max(len(tasks) // 2, 2)
    useful = [name for name, found in values.items() if len(found) <= most and all(len(one) <= 60 for one in found)]
    return useful, tasks


def pivot(
    evaluations: list[Evaluation], by: str, value: str, tasks: dict[str, dict[str, Any]]
) -> tuple[list[str], dict[str, dict[str, tuple[float, int]]]]:
    """Rows (a task, or a value of a column) in order, and of each the value and number of attempts by evaluation."""
    cells: dict[str, dict[str, list[Attempt]]] = defaultdict(lambda: defaultdict(list))
    for evaluation in evaluations:
        for attempt in evaluation.attempts:
            row = attempt.task if by == "task" else label(tasks.get(attempt.task, {}).get(by))
            cells[row][evaluation.id].append(attempt)
    table = {
        row: {
            column: (found, len(attempts))
            for column, attempts in of_row.items()
            if (found := _value(attempts, value)) is not None
        }
        for row, of_row in cells.items()
    }
    return sorted(table), table


def label(value: Any) -> str:
    """A column's value as the name of a row."""
    if value is None:
        return "–"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _value(attempts: list[Attempt], value: str) -> float | None:
    scored = [one.reward for one in attempts if one.reward is not None]
    if value == "tokens":
        return fmean(one.tokens for one in attempts)
    if value == "failed":
        return 1 - len(scored) / len(attempts)
    if not scored:
        return None
    return fmean(scored) if value == "reward" else fmean(reward >= PASS for reward in scored)


def _mean(attempts: list[Attempt]) -> float | None:
    scored = [one.reward for one in attempts if one.reward is not None]
    return fmean(scored) if scored else None


def _change(a: float | None, b: float | None) -> Change:
    if a is None or b is None:
        return "only b" if a is None else "only a"
    if a < PASS <= b:
        return "fixed"
    if b < PASS <= a:
        return "broke"
    return "better" if b > a + LEAST else "worse" if b < a - LEAST else "same"


def _finite(reward: Any) -> float | None:
    return reward if isinstance(reward, float) and math.isfinite(reward) else None
