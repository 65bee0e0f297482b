"""`EvaluationRow`: a task, and all that comes of it. Its JSON is Eval Protocol's, in both directions."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import uuid
from datetime import UTC, datetime
from functools import cache
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from mrl.evaltests.messages import Message
from mrl.evaltests.results import EvaluateResult, EvaluationThreshold
from mrl.evaltests.status import Status


@cache
def mrl_version() -> str:
    """Of mrl: a test's own is not known."""
    try:
        return importlib.metadata.version("mrl")
    except importlib.metadata.PackageNotFoundError:
        return "0"


def new_id() -> str:
    """For what has no name of its own."""
    return uuid.uuid4().hex[:16]


class Usage(BaseModel):
    """Tokens that a model read and wrote."""

    model_config = ConfigDict(extra="allow")

    completion_tokens: int = 0
    prompt_tokens: int = 0
    total_tokens: int = 0


class InputMetadata(BaseModel):
    """Where a row comes from, and what it is attempted with."""

    model_config = ConfigDict(extra="allow")

    row_id: str | None = None
    """None = made of the row's content, the same in every process."""
    completion_params: dict[str, Any] = Field(default_factory=dict)
    """`model`, `temperature`, `max_tokens`, `base_url` …"""
    dataset_info: dict[str, Any] | None = None
    """What the dataset says beside the messages."""
    session_data: dict[str, Any] | None = None


class CostMetrics(BaseModel):
    """Dollars."""

    input_cost: float | None = None
    output_cost: float | None = None
    total_cost_dollar: float | None = None


class ExecutionMetadata(BaseModel):
    """Which execution a row belongs to, and what it took."""

    invocation_id: str | None = Field(default_factory=new_id)
    """One execution of a test."""
    experiment_id: str | None = Field(default_factory=new_id)
    """One combination of its parameters."""
    rollout_id: str | None = Field(default_factory=new_id)
    """One attempt at one row."""
    run_id: str | None = None
    """One attempt at every row."""
    usage: Usage | None = None
    cost_metrics: CostMetrics | None = None
    duration_seconds: float | None = None
    rollout_duration_seconds: float | None = None
    eval_duration_seconds: float | None = None
    experiment_duration_seconds: float | None = None
    extra: dict[str, Any] | None = None
    """`step_rewards`, `prompt_ids`, `completion_ids`, `full_episode` …"""
    finish_reason: str | None = None
    tool_call_count: int | None = None
    raw_output: dict[str, Any] | None = None


class EvalMetadata(BaseModel):
    """Of the evaluation."""

    name: str
    description: str | None = None
    version: str = Field(default_factory=mrl_version)
    status: Status | None = None
    num_runs: int
    aggregation_method: str
    passed_threshold: EvaluationThreshold | None = None
    passed: bool | None = None


class EvaluationRow(BaseModel):
    """A row of a dataset; after a rollout with the whole conversation, after an evaluation with its result."""

    model_config = ConfigDict(extra="allow")

    messages: list[Message] = Field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    input_metadata: InputMetadata = Field(default_factory=InputMetadata)
    rollout_status: Status = Field(default_factory=Status.rollout_running)
    ground_truth: Any = None
    evaluation_result: EvaluateResult | None = None
    execution_metadata: ExecutionMetadata = Field(default_factory=ExecutionMetadata)
    created_at: datetime = Field(default_factory=lambda: datetime.now(UTC))
    eval_metadata: EvalMetadata | None = None
    pid: int | None = None

    def get_system_message(self) -> Message:
        """The first one; an empty one where there is none."""
        return next(iter(self._of("system")), Message(role="system", content=""))

    def get_user_messages(self) -> list[Message]:
        """In their order."""
        return self._of("user")

    def get_first_user_message(self) -> Message | None:
        """None where there is none."""
        return next(iter(self._of("user")), None)

    def get_assistant_messages(self) -> list[Message]:
        """In their order."""
        return self._of("assistant")

    def last_assistant_message(self) -> Message | None:
        """None where there is none."""
        return next(reversed(self._of("assistant")), None)

    def get_conversation_length(self) -> int:
        """How many messages there are."""
        return len(self.messages)

    def get_input_metadata(self, key: str, default: Any = None) -> Any:
        """A field of `input_metadata`."""
        return getattr(self.input_metadata, key, default)

    def is_trajectory_evaluation(self) -> bool:
        """Whether its result has steps."""
        return self.evaluation_result is not None and bool(self.evaluation_result.step_outputs)

    def get_steps(self) -> int:
        """Messages with which an environment said something."""
        return len(self._controlled())

    def get_total_reward(self) -> float:
        """The sum of what it said they earned."""
        return sum(float(step.get("reward") or 0.0) for step in self._controlled())

    def get_terminated(self) -> bool:
        """Whether it said that it is over."""
        return any(step.get("terminated") for step in self._controlled())

    def get_termination_reason(self) -> str:
        """Why, where it said that."""
        reasons = [step["termination_reason"] for step in self._controlled() if step.get("termination_reason")]
        return str(reasons[-1]) if reasons else "unknown"

    def _of(self, role: str) -> list[Message]:
        return [message for message in self.messages if message.role == role]

    def _controlled(self) -> list[dict[str, Any]]:
        return [message.control_plane_step for message in self.messages if message.control_plane_step]


def content_id(row: EvaluationRow) -> str:
    """A row's id where it brings none: a hash of what it says, the same in every process."""
    said = row.model_dump(
        mode="json",
        exclude_none=True,
        include={"messages", "tools", "ground_truth", "input_metadata"},
    )
    for message in said["messages"]:
        for call in message.get("tool_calls") or []:
            call.pop("id", None)  # may have been made up
    said["input_metadata"].pop("completion_params", None)
    said["input_metadata"].pop("session_data", None)
    text = json.dumps(said, sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
