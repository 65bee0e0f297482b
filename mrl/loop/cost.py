"""What a run has cost since its beginning, and the most that it may."""

from __future__ import annotations

from pathlib import Path

from mrl.backends import Backend
from mrl.config import OrchestratorConfig
from mrl.errors import ConfigError
from mrl.loop.resources import actor_resources, needs
from mrl.loop.spawning import backend_of
from mrl.store.find import COST
from mrl.store.run import read_rows

EVENT = "cost"


class Cost:
    """Dollars of a run over all its sessions, by its backend's list prices; None where the backend knows none.

    before: what earlier sessions, and earlier backends of this one, have cost.
    """

    def __init__(self, limit: float | None, before: float = 0.0) -> None:
        self.limit, self.before = limit, before
        self.backend: Backend | None = None

    def count(self, backend: Backend) -> None:
        """Workers are this backend's from now on."""
        if self.backend is not None:
            self.before += self.backend.spent() or 0.0
        self.backend = backend

    def dollars(self) -> float | None:
        """So far."""
        spent = None if self.backend is None else self.backend.spent()
        return None if spent is None else self.before + spent

    def metrics(self) -> dict[str, float]:
        """Of a step."""
        dollars = self.dollars()
        return {} if dollars is None else {COST: dollars}

    def reached(self) -> bool:
        """Whether the run has cost as much as it may."""
        return self.limit is not None and (self.dollars() or 0.0) >= self.limit


def cost_before(run: Path) -> float:
    """What a recorded run has cost, as far as its record knows: also of steps that it forgets when it is resumed."""
    known = [row[COST] for row in read_rows(run, "metrics") if COST in row]
    known += [row["dollars"] for row in read_rows(run, "events") if row["kind"] == EVENT]
    return max(known, default=0.0)


def check_cost(config: OrchestratorConfig, run: Path, *, resume: bool) -> None:
    """Raise ConfigError, before anything starts, for a `max_cost` that nobody can keep or that is spent."""
    limit = config.runtime.max_cost
    if limit is None:
        return
    backend = backend_of(config)
    wanted = {"actor": actor_resources(config)} if config.trl.mode == "simple" else needs(config)
    if all(backend.price(name, resources) is None for name, resources in wanted.items()):
        raise ConfigError(
            f"max_cost: backend {config.runtime.backend} knows no prices, so nothing would ever reach {limit:g} "
            "dollars; leave max_cost out"
        )
    spent = cost_before(run) if resume else 0.0
    if spent >= limit:
        raise ConfigError(
            f"max_cost: this run has cost {spent:.2f} dollars already, of {limit:g}; raise max_cost to go on with it"
        )
