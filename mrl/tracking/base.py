"""What a tracker is."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass
class RunInfo:
    """What a tracker may show before the first step."""

    name: str
    folder: Path
    total_steps: int
    config: dict[str, Any]
    facts: dict[str, Any] = field(default_factory=dict)
    """Model, device, dataset sizes: for people."""


class Tracker(Protocol):
    """Implemented by one file per technology in this package."""

    def start(self, run: RunInfo) -> None: ...

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """One step's metrics (names: docs/metrics.md)."""
        ...

    def note(self, message: str) -> None:
        """Something a person should see."""
        ...

    def finish(self) -> None: ...
