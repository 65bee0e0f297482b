"""Why rollouts failed, in few lines: messages that differ only in numbers and quoted texts are one cause."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

LISTED = 3
"""Causes that are named; the rest is counted."""
LONGEST = 240
"""Characters of a cause that are shown."""

_VARIABLE = re.compile(
    r"""'[^'\n]*'|"[^"\n]*"|\b0x[0-9a-fA-F]+\b|(?<![\w.])-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?""",
)
"""What messages of one cause may differ in: quoted texts, addresses, numbers that are not part of a name."""


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
