"""Evaluation tests that runs are trained on; a module, as workers in other processes find them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from mrl.evals import (
    EvaluateResult,
    EvaluationRow,
    Message,
    MetricResult,
    NoOpRolloutProcessor,
    OpenEnvRolloutProcessor,
    evaluation_test,
)

ROWS = [[Message(role="user", content=f"say {number}")] for number in range(4)]


@evaluation_test(input_messages=[ROWS])
def distinct(row: EvaluationRow) -> EvaluationRow:
    text = row.last_assistant_message().text
    row.evaluation_result = EvaluateResult(
        score=len(set(text)) / 8, metrics={"length": MetricResult(score=len(text), reason="characters")}
    )
    return row


@evaluation_test(input_messages=[ROWS], mode="groupwise")
def ranked(rows: list[EvaluationRow]) -> list[EvaluationRow]:
    order = sorted(rows, key=lambda row: len(set(row.messages[-1].text)))
    for place, row in enumerate(order):
        row.evaluation_result = EvaluateResult(
            score=float(place), metrics={"group": MetricResult(score=len(rows), reason="")}
        )
    return order


@evaluation_test(input_messages=[ROWS], mode="all")
def against_the_mean(rows: list[EvaluationRow]) -> list[EvaluationRow]:
    lengths = [len(set(row.messages[-1].text)) for row in rows]
    for row, length in zip(rows, lengths, strict=True):
        row.evaluation_result = EvaluateResult(
            score=length - sum(lengths) / len(rows), metrics={"together": MetricResult(score=len(rows), reason="")}
        )
    return rows


@evaluation_test(input_messages=[ROWS])
def picky(row: EvaluationRow) -> EvaluationRow:
    """The rows' numbers decide: 0 cannot be scored."""
    row.evaluation_result = EvaluateResult(
        score=len(set(row.messages[-1].text)) / 8, is_score_valid=row.messages[0].text != "say 0", reason="it is 0"
    )
    return row


class Moves:
    """Two steps; each earns 1 where the text has an even number of characters."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self) -> Any:
        self.steps = 0
        return SimpleNamespace(observation=SimpleNamespace(text="go"), reward=None, done=False)

    def step(self, action: str) -> Any:
        self.steps += 1
        reward = float(len(action) % 2 == 0)
        return SimpleNamespace(observation=SimpleNamespace(text="on"), reward=reward, done=self.steps == 2)


@evaluation_test(
    input_messages=[ROWS],
    rollout_processor=OpenEnvRolloutProcessor(
        Moves, lambda observation, step, history: observation.text, lambda text: text
    ),
    steps=4,
)
def played(row: EvaluationRow) -> EvaluationRow:
    steps = row.execution_metadata.extra["step_rewards"]
    row.evaluation_result = EvaluateResult(score=sum(steps) / 4 + len(set(row.messages[-1].text)) / 100)
    return row


@evaluation_test(input_messages=[ROWS], rollout_processor=NoOpRolloutProcessor())
def judged(row: EvaluationRow) -> EvaluationRow:
    row.evaluation_result = EvaluateResult(score=1.0)
    return row
