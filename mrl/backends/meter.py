"""What workers have cost, for backends that know a price."""

from __future__ import annotations

import time
from collections.abc import Callable


class Meter:
    """Dollars of workers by name, each from its first start until `stop`: one that replaces another goes on where that
    one ended. clock: seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.running: dict[str, tuple[float, float]] = {}
        """Dollars per hour, and since when."""
        self.ended = 0.0

    def start(self, name: str, per_hour: float) -> None:
        """A worker starts, unless one of its name has before."""
        self.running.setdefault(name, (per_hour, self.clock()))

    def stop(self) -> None:
        """All of them end."""
        self.ended, self.running = self.dollars(), {}

    def dollars(self) -> float:
        """So far."""
        now = self.clock()
        return self.ended + sum(rate * (now - since) / 3600 for rate, since in self.running.values())
