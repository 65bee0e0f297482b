"""How a rollout or an evaluation ended: a code of google.rpc.Code or Eval Protocol's own, a message, details."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from pydantic import BaseModel, Field

_DETAIL = "type.googleapis.com/google.rpc.ErrorInfo"
_DOMAIN = "evalprotocol.io"


class Code(IntEnum):
    """google.rpc.Code, and from 100 on Eval Protocol's."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16
    FINISHED = 100
    RUNNING = 101
    SCORE_INVALID = 102
    RESPONSE_QUALITY_ERROR = 103


class Status(BaseModel):
    """A code, a message for people, and details in google.rpc's form."""

    code: Code
    message: str
    details: list[dict[str, Any]] = Field(default_factory=list)

    @classmethod
    def rollout_running(cls) -> Status:
        """It has not ended."""
        return cls(code=Code.RUNNING, message="Rollout is running")

    @classmethod
    def rollout_finished(cls, reason: str | None = None) -> Status:
        """It has ended as it should. reason: `stop`, `length`, `max_steps`, `control_plane_signal` …"""
        detail = {
            "@type": _DETAIL,
            "reason": "TERMINATION_REASON",
            "domain": _DOMAIN,
            "metadata": {"termination_reason": reason},
        }
        return cls(code=Code.FINISHED, message="Rollout finished", details=[detail] if reason else [])

    @classmethod
    def rollout_error(cls, message: str) -> Status:
        """It failed."""
        return cls(code=Code.INTERNAL, message=message)

    @classmethod
    def eval_running(cls) -> Status:
        """The evaluation has not ended."""
        return cls(code=Code.RUNNING, message="Evaluation is running")

    @classmethod
    def eval_finished(cls) -> Status:
        """The evaluation has ended."""
        return cls(code=Code.FINISHED, message="Evaluation finished")

    @classmethod
    def error(cls, message: str) -> Status:
        """The evaluation failed."""
        return cls(code=Code.INTERNAL, message=message)

    @classmethod
    def score_invalid(cls, message: str = "Score is invalid") -> Status:
        """There is no score."""
        return cls(code=Code.SCORE_INVALID, message=message)

    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self.code == Code.RUNNING

    def is_finished(self) -> bool:
        """Whether it ended as it should."""
        return self.code == Code.FINISHED

    def is_error(self) -> bool:
        """Whether it ended with any error."""
        return self.code not in (Code.OK, Code.FINISHED, Code.RUNNING, Code.SCORE_INVALID)

    def get_termination_reason(self) -> str | None:
        """Why a rollout ended, where it says so."""
        for detail in self.details:
            reason = (detail.get("metadata") or {}).get("termination_reason")
            if detail.get("reason") == "TERMINATION_REASON" and reason is not None:
                return str(reason)
        return None
