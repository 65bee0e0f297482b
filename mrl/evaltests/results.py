"""What an evaluation says of a row: a score, its parts, and what came of each step."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field


class _Mapping(BaseModel):
    """A model whose fields can also be read as those of a dict."""

    def __getitem__(self, key: str) -> Any:
        if key not in type(self).model_fields:
            raise KeyError(key)
        return getattr(self, key)

    def __contains__(self, key: str) -> bool:
        return key in type(self).model_fields

    def get(self, key: str, default: Any = None) -> Any:
        """As a dict's."""
        return getattr(self, key, default)


class MetricResult(_Mapping):
    """One part of a score, or something measured beside it."""

    is_score_valid: bool = True
    score: float
    reason: str
    data: dict[str, Any] = Field(default_factory=dict)
    """For looking at."""


class StepOutput(BaseModel):
    """What a step of an attempt was worth."""

    step_index: int | str
    """Which: an assistant message's number, a turn's."""
    base_reward: float
    terminated: bool = False
    """Whether the environment ended with it."""
    control_plane_info: dict[str, Any] | None = None
    metrics: dict[str, Any] = Field(default_factory=dict)
    reason: str | None = None


class EvaluateResult(_Mapping):
    """What a row is worth."""

    score: float
    """Usually from 0 to 1."""
    is_score_valid: bool = True
    """False = it could not be told. The row is counted, and is in no mean and no gradient: it is not a 0."""
    reason: str | None = None
    metrics: dict[str, MetricResult] = Field(default_factory=dict)
    """Parts of the score by name; their means are metrics of the run."""
    step_outputs: list[StepOutput] | None = None
    error: str | None = None
    trajectory_info: dict[str, Any] | None = None
    final_control_plane_info: dict[str, Any] | None = None
    agg_score: float | None = None
    """Of the whole experiment, filled in when it has ended."""
    standard_error: float | None = None
    """Of `agg_score`."""


class EvaluationThreshold(BaseModel):
    """When an evaluation passes."""

    success: float
    """The aggregated score is at least this."""
    standard_error: float | None = Field(default=None, ge=0.0, le=1.0)
    """And its standard error at most this; None = whatever it is."""
