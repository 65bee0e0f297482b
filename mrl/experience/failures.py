"""Rollouts that failed: too many of them end the run, and their causes are told in few lines.

Messages that differ only in numbers and quoted texts are one cause.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from mrl.algorithms.turns import turn_lengths, turn_rewards
from mrl.config import OrchestratorConfig
from mrl.errors import TrainingError
from mrl.experience.groups import is_scored, reads_of
from mrl.types import Group

LISTED = 3
"""Causes that are named; the rest is counted."""
LONGEST = 240
"""Characters of a cause that are shown."""

_VARIABLE = re.compile(
    r"""'[^'\n]*'|"[^"\n]*"|\b0x[0-9a-fA-F]+\b|(?<![\w.])-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?""",
)
"""What messages of one cause may differ in: quoted texts, addresses, numbers that are not part of a name."""


def check_failures(groups: list[Group], config: OrchestratorConfig, step: int) -> None:
    """Raise TrainingError, with the causes counted, when too many of a step's rollouts failed."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    failed = [rollout for rollout in rollouts if not is_scored(rollout)]
    if len(failed) <= config.training.max_failed_fraction * len(rollouts):
        return
    what = "scored" if all(rollout.samples for rollout in failed) else "generated or scored"
    raise TrainingError(
        f"step {step}: {len(failed):,} of {len(rollouts):,} rollouts could not be {what} (max_failed_fraction is "
        f"{config.training.max_failed_fraction}). Causes:\n"
        + in_lines(group_causes((rollout.error, 1) for rollout in failed))
    )


def check_step_rewards(groups: list[Group], config: OrchestratorConfig) -> None:
    """Mark rollouts failed whose step rewards cannot be told apart by turn, where the advantage needs them to be."""
    if reads_of(config) != "steps":
        return
    for rollout in (rollout for group in groups for rollout in group.rollouts if is_scored(rollout)):
        try:
            turn_rewards(0.0, rollout.step_rewards, len(turn_lengths([sample.mask for sample in rollout.samples])))
        except ValueError as error:
            rollout.fail(f"advantage_type {config.algorithm.advantage_type}: {error}")


@dataclass
class Cause:
    """Failures that have one template."""

    parts: list[str]
    """The template: what stands around the variables."""
    values: list[str]
    """The variables; `…` where the messages differ."""
    count: int = 0

    @property
    def text(self) -> str:
        """The message, with `…` where those of this cause differ, on one line."""
        joined = "".join(part + value for part, value in zip(self.parts, [*self.values, ""], strict=True))
        line = " ".join(joined.split())
        return line if len(line) <= LONGEST else line[: LONGEST - 1] + "…"


def cause_key(message: str) -> str:
    """Equal for messages of one cause."""
    return _VARIABLE.sub("…", message)


def group_causes(messages: Iterable[tuple[str | None, int]]) -> list[Cause]:
    """The causes behind messages, each with how often it was given; the most frequent first."""
    causes: dict[str, Cause] = {}
    for given, count in messages:
        message = given or "no reason was given"
        parts, values = _VARIABLE.split(message), _VARIABLE.findall(message)
        cause = causes.setdefault(cause_key(message), Cause(parts, values))
        cause.values = [mine if mine == other else "…" for mine, other in zip(cause.values, values, strict=True)]
        cause.count += count
    return sorted(causes.values(), key=lambda cause: -cause.count)


def in_one_line(causes: list[Cause]) -> str:
    """The first few; with numbers where there is more than one."""
    if len(causes) == 1:
        return causes[0].text
    return "; ".join(_counted(causes))


def in_lines(causes: list[Cause]) -> str:
    """The same as a list, a line each."""
    return "\n".join(f"  {line}" for line in _counted(causes))


def _counted(causes: list[Cause]) -> list[str]:
    lines = [f"{cause.count:,} x {cause.text}" for cause in causes[:LISTED]]
    rest = causes[LISTED:]
    if rest:
        lines.append(f"{sum(cause.count for cause in rest):,} x {len(rest):,} other cause{'s' * (len(rest) > 1)}")
    return lines
