"""What goes to a reward worker and what comes back: plain data, and the protocol of one reward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from mrl.types import Message, Prompt


@dataclass(slots=True)
class RewardRequest:
    """One rollout to score."""

    rollout_id: str
    prompt: Prompt
    completion: str | list[Message]
    completion_ids: list[int]
    columns: dict[str, Any] = field(default_factory=dict)
    """The task's dataset columns and whatever the rollout source added."""
    task_id: str = ""
    """Rollouts of one task are scored in one call."""
    own: dict[str, float | None] = field(default_factory=dict)
    """Rewards that it brought, by name, which are added to what the functions give; None = does not apply."""


@dataclass(slots=True)
class RewardResult:
    """What one rollout earned."""

    reward: float | None
    """`None` = it could not be scored; `error` says why. Never NaN or infinite."""
    rewards: dict[str, float | None] = field(default_factory=dict)
    """By reward, in the order they were given; `None` = does not apply to this row, or could not be told."""
    error: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    """This row's `log_extra` columns."""


@dataclass(frozen=True)
class Code:
    """A Python file of this machine that a reward's options name."""

    file: Path
    root: Path
    """The folder from which it imports its neighbours."""
    elsewhere: Callable[[str], dict[str, Any]]
    """The options that name it where a copy has this path."""


class Total(float):
    """A metric that adds up over the parts of a step, where others are averaged: requests, tokens, money."""


@dataclass(slots=True)
class RewardReport:
    """The answer to one batch of requests."""

    results: list[RewardResult]
    """One per request, in order."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Mean of each `log_metric` name, sum of those that are a `Total`."""


@dataclass(slots=True)
class Scores:
    """What one reward says of a batch."""

    values: list[float | None]
    """One per request. `None` = it does not apply, unless `errors` has the row."""
    errors: dict[int, str] = field(default_factory=dict)
    """Rows that could not be scored, and why, naming the reward."""
    extra: dict[str, list[Any]] = field(default_factory=dict)
    """Columns for the log, one value per request."""
    metrics: dict[str, list[float]] = field(default_factory=dict)

    @classmethod
    def failed(cls, count: int, error: str) -> Scores:
        """No row of the batch could be scored, for one reason."""
        return cls([None] * count, dict.fromkeys(range(count), error))


@runtime_checkable
class Reward(Protocol):
    """Scores rollouts.

    Optional attributes: `check_columns(columns)`, which raises RewardError when a dataset will not do;
    `check_attempts(attempts)`, which raises ConfigError when so many at a held-out task are too few; `bounded = True`
    when `score` ends by itself, so that `reward_timeout` is not applied to it; `logged`, the names of the metrics it
    may log (None, or not there: any); `independent = True` when it looks at each rollout, or each group, by itself, so
    that groups may be scored as they end; `open(folder)`, called on the worker before the first batch, which may take
    its time (folder: the run's, None where there is none); `close()`, which may be asynchronous; `try_once(task)`,
    asynchronous, which asks whatever it depends on once before a run and returns notices, or raises RewardError;
    `recorded()`, what a recipe would say in place of the object. Of a class with options: `paths`, those that may name
    local files, and the static `code(options)`, the `Code` that they name, or None.
    """

    name: str

    async def score(self, requests: list[RewardRequest], *, trainer_state: Any) -> Scores:
        """Score a batch. What goes wrong with a row belongs in `errors`; RewardError ends the run.

        trainer_state: usually an `AttributeDict`.
        """
        ...


class AttributeDict(dict[str, Any]):
    """Where the run is (`global_step` …): a dict whose keys also read as attributes, as TRL's functions expect."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"trainer_state has no {name!r} (it has: {', '.join(self) or 'nothing'})") from None


def completion_text(completion: str | list[Message]) -> str:
    """The text of a completion: itself, or what its last assistant message says."""
    if isinstance(completion, str):
        return completion
    for message in reversed(completion):
        if message.get("role", "assistant") == "assistant":
            content = message.get("content")
            if isinstance(content, list):
                return "".join(part.get("text") or "" for part in content if isinstance(part, dict))
            return content or ""
    return ""
