"""What a tracker is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from mrl.types import Outcome

WARNING = "warning: "
"""Prefix of a `note` that is a warning."""


@dataclass
class RunInfo:
    """What a tracker may show before the first step."""

    name: str
    folder: Path
    total_steps: int
    config: dict[str, Any]
    facts: dict[str, Any] = field(default_factory=dict)
    """Model, device, dataset sizes: for people."""
    step: int = 0
    """The last step that is done: 0 for a new run, the checkpoint's step for a resumed one."""
    resume_ids: dict[str, str] = field(default_factory=dict)
    """Tracker's name to the id its record of this run has, from the checkpoint."""


class Tracker(Protocol):
    """Implemented by one file per technology in this package.

    Calls come from one thread per tracker, in order, `start` first. A tracker may raise anything: it is then left out
    and the run goes on. Optional attributes of the class, for `TrackerSet` and `check_trackers`:

    requires: modules it imports, installed by the extra of its name. check: a static method that raises ConfigError
    when the tracker cannot work here. direct: True = called on the run's own thread (it must never wait). phase: a
    method of a direct tracker, told what the run is doing now (`phase("generating", "3/8 groups, 1,024 tokens")`):
    twice a second while it trains, and before `start` as well.
    """

    @property
    def run_id(self) -> str | None:
        """What its record of this run is called, to continue it later; None while there is none."""
        ...

    def start(self, run: RunInfo) -> None:
        """Open the run's record, or continue the one `run.resume_ids` names after `run.step`."""
        ...

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """A step's metrics, or an evaluation's after it (names: docs/metrics.md)."""
        ...

    def note(self, message: str) -> None:
        """Something a person should see."""
        ...

    def finish(self, status: Outcome = "finished") -> None:
        """Write out what is still held."""
        ...


def flat_params(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """A nested configuration as dotted names and values."""
    for name, value in config.items():
        if isinstance(value, dict) and value:
            yield from flat_params(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def safe_name(name: str) -> str:
    """A metric's name with what some trackers refuse replaced by `_`."""
    return re.sub(r"[^\w\-. :/]", "_", name)
