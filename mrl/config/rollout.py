"""Options of the attempts: who makes them, and within which limits."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from mrl.config.section import Section


class RolloutConfig(Section):
    """The attempts: which source makes rollouts of tasks, how long one may take, how many run at a time."""

    rollout_source: str = "single_turn"
    """What makes a rollout of a task: `single_turn` (a prompt, a completion), or one that a package registers
    (docs/extending.md)."""
    rollout_options: dict[str, Any] = Field(default_factory=dict)
    """The source's own options, by name."""
    rollout_timeout: float | None = Field(None, gt=0)
    """Seconds one attempt may take; then it is a failed rollout. None = no limit."""
    max_concurrent_rollouts: int | None = Field(None, ge=1)
    """Attempts under way at a time; None = all of a step. With a limit, sampling is not repeatable to the last bit."""
