"""Options for generating while training (docs/async.md)."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from mrl.config.section import Section, refuse_changed
from mrl.errors import ConfigError


class OverlapConfig(Section):
    """Generating while training: how far ahead, and what becomes of old rollouts (docs/async.md)."""

    async_mode: Literal["off", "pipeline", "queue"] = "off"
    """`off` = a step's rollouts come from the newest weights, and nothing is generated while it trains. `pipeline` =
    the next step's rollouts are generated while this one trains. `queue` = tasks are attempted without a pause, and
    each step takes those that end first."""
    max_staleness: int = Field(1, ge=0)
    """With `queue`, policy versions that a rollout's oldest token may be behind the actor that trains on it."""
    stale_rollouts: Literal["drop", "correct"] = "drop"
    """With `queue`, what becomes of older ones: left out and counted, or trained on with `importance_sampling`."""
    in_flight_updates: bool = True
    """With `queue`, rollout workers take new weights between two tokens of what they generate. If false, they end their
    completions first."""
    over_sampling: float = Field(1.0, ge=1.0)
    """Groups begun for a step as a multiple of `batch_size`; the step takes those that end first. The others are
    restarted for the next step, or with `queue` carried into it."""

    @field_validator("async_mode", mode="before")
    @classmethod
    def _yaml_reads_off_as_false(cls, value: Any) -> Any:
        return "off" if value is False else value

    @model_validator(mode="after")
    def _goes_with_the_mode(self) -> Self:
        if self.async_mode != "queue":
            refuse_changed(self, ("max_staleness", "stale_rollouts", "in_flight_updates"), "async_mode: queue")
        elif self.over_sampling > 1 and self.max_staleness == 0:
            raise ConfigError(
                "over_sampling: with async_mode queue what is begun is carried into the next step, which max_staleness "
                "0 forbids; use max_staleness: 1, or async_mode: off"
            )
        return self

    @property
    def steps_ahead(self) -> int:
        """Steps by which tasks are begun before the weights of the step before theirs are there."""
        return {"off": 0, "pipeline": 1}.get(self.async_mode, self.max_staleness)

    @property
    def by_group(self) -> bool:
        """Whether tasks are attempted one by one, so that a step can take those that end first."""
        return self.over_sampling > 1 or (self.async_mode == "queue" and self.max_staleness > 0)

    @property
    def in_flight(self) -> bool:
        """Whether weights are updated while something is generated."""
        return self.by_group and self.async_mode == "queue" and self.in_flight_updates
