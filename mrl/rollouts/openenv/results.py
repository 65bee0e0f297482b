"""What an environment answers, in one form wherever it runs, and the errors that say what went wrong there."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from mrl.errors import EnvError

AnswerFields = ("reward", "done", "metadata")
"""Fields of an observation that are the environment's answer rather than what is seen."""


class Fields(dict[str, Any]):
    """An observation: its fields by name, as `observation["text"]` or `observation.text`, nested ones too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(
                f"the observation has no field {name!r} (it has {', '.join(self) or 'none'})"
            ) from None


@dataclass
class Result:
    """What came of a reset or a step."""

    observation: Any
    reward: float | None = None
    done: bool = False
    parts: dict[str, float] = field(default_factory=dict)
    """Of the reward, by name (`rewards` in the metadata)."""


class AtCapacity(EnvError):
    """The server has as many sessions as it takes; another one has to wait."""


class Lost(EnvError):
    """The environment cannot be reached, or could until now."""


def as_fields(value: Any) -> Any:
    """Dicts as `Fields`, however deep."""
    if isinstance(value, dict):
        return Fields({str(name): as_fields(inner) for name, inner in value.items()})
    return [as_fields(inner) for inner in value] if isinstance(value, list) else value


def plain(value: Any) -> Any:
    """A pydantic object as a dict, anything else as it is."""
    return value.model_dump() if hasattr(value, "model_dump") else value


def result_of(answer: Any, who: str, *, typed: bool) -> Result:
    """A `Result` of whatever a client or an environment returns: OpenEnv's StepResult, or an Observation.

    who: function and line that returned it, for messages. typed: leave the observation as it is, else make it `Fields`.
    Raises EnvError for what is neither, and for a reward that is no number.
    """
    if hasattr(answer, "observation") and hasattr(answer, "done"):
        seen, metadata = answer.observation, getattr(answer, "metadata", None)
    elif hasattr(answer, "done") and hasattr(answer, "reward"):
        seen, metadata = answer, getattr(answer, "metadata", None)
    else:
        raise EnvError(
            f"{who} returned {_short(answer)}, of type {type(answer).__name__}; it returns an Observation, or a "
            "StepResult with observation, reward and done"
        )
    if not typed and hasattr(seen, "model_dump"):
        seen = as_fields({name: value for name, value in seen.model_dump().items() if name not in AnswerFields})
    elif not typed:
        seen = as_fields(seen)
    named = metadata.get("rewards") if isinstance(metadata, dict) else None
    if named and not isinstance(named, dict):
        raise EnvError(f"{who} gave `rewards` of type {type(named).__name__} in its metadata; it has numbers by name")
    if answer.done not in (True, False, None):
        raise EnvError(f"{who} gave the `done` {_short(answer.done)}, of type {type(answer.done).__name__}")
    parts = {str(name): reward_of(value, who) or 0.0 for name, value in named.items()} if named else {}
    reward = reward_of(answer.reward, who)
    return Result(seen, sum(parts.values()) if reward is None and parts else reward, bool(answer.done), parts)


def reward_of(value: Any, who: str) -> float | None:
    """A reward as a number. Raises EnvError naming who gave another."""
    if value is None:
        return None
    if isinstance(value, bool | int | float) and math.isfinite(value):
        return float(value)
    if hasattr(value, "item") and getattr(value, "size", None) == 1:  # numpy's numbers
        return reward_of(value.item(), who)
    raise EnvError(f"{who} gave the reward {_short(value)}, of type {type(value).__name__}, not a finite number")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:79] + "…"
