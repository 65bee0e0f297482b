"""Rows on their way through a run: as tasks, and again as rows once a rollout has been made."""

from __future__ import annotations

from typing import Any

from mrl.errors import DataError
from mrl.evaltests.messages import Message
from mrl.evaltests.rows import EvaluationRow, ExecutionMetadata
from mrl.evaltests.status import Status
from mrl.types import Message as PlainMessage
from mrl.types import Prompt, Rollout, Task

ROW = "evaluation_row"
"""The column of a task with its row, but for the messages."""
MADE = "evaluation"
"""What a rollout brings beside its messages: `execution_metadata`, `tools`."""
RESULT = "evaluation_result"
"""What the test said of a rollout."""
DROPPED = ("evaluation_result", "eval_metadata", "pid", "created_at")
"""Of an earlier evaluation."""


def tasks_of(rows: list[EvaluationRow]) -> list[Task]:
    """One for each row. Raises DataError for a row without messages."""
    tasks = []
    for row in rows:
        assert row.input_metadata.row_id is not None, "rows of a test have ids"
        if not row.messages:
            raise DataError(f"row {row.input_metadata.row_id}: it has no messages, so there is nothing to ask")
        kept = row.model_dump(mode="json", exclude={"messages", *DROPPED}, exclude_none=True)
        prompt = [message.plain() for message in row.messages]
        columns: dict[str, Any] = {ROW: kept}
        if row.ground_truth is not None:
            columns["ground_truth"] = row.ground_truth
        tasks.append(Task(row.input_metadata.row_id, prompt, columns))
    return tasks


def row_of_task(task: Task) -> EvaluationRow:
    """The row before it is attempted. Raises DataError for a task that is none of a test."""
    if ROW not in task.columns:
        raise DataError(f"task {task.id!r} is no row of an evaluation test: it has no column {ROW}")
    messages = [Message.of(message) for message in as_messages(task.prompt)]
    return EvaluationRow.model_validate(task.columns[ROW] | {"messages": messages})


def row_of_attempt(prompt: Prompt, completion: Any, columns: dict[str, Any]) -> EvaluationRow:
    """The row with what came of it. columns: the task's, and what the rollout brought."""
    said = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
    made = columns.get(MADE) or {}
    row = EvaluationRow.model_validate(
        columns[ROW] | {"messages": [Message.of(message) for message in [*as_messages(prompt), *said]]}
    )
    row.execution_metadata = ExecutionMetadata.model_validate(made.get("execution_metadata") or {})
    row.input_metadata.completion_params = made.get("completion_params") or row.input_metadata.completion_params
    row.tools = made.get("tools") or row.tools
    row.rollout_status = Status.rollout_finished(made.get("termination_reason"))
    return row


def row_of_rollout(task: Task, rollout: Rollout) -> EvaluationRow:
    """The same of a rollout; one that failed says why."""
    if rollout.samples or rollout.completion:
        row = row_of_attempt(rollout.prompt, rollout.completion, task.columns | rollout.extra)
    else:
        row = row_of_task(task)
    if rollout.status == "failed" and RESULT not in rollout.extra:
        row.rollout_status = Status.rollout_error(rollout.error or "it failed")
    return row


def as_messages(prompt: Prompt) -> list[PlainMessage]:
    """A prompt as messages."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
