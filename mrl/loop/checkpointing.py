"""When checkpoints are written, which are kept, and what becomes of one that could not be written."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mrl.backends import Backend, WorkerHandle
from mrl.config import OrchestratorConfig
from mrl.errors import CheckpointError, ConfigError
from mrl.store.checkpoints import prune
from mrl.store.run import RunStore
from mrl.system.threads import in_thread

KINDS = ("eval", "reward", "train")
"""Prefixes of metrics that not every step has."""


class Checkpointing:
    """A run's checkpoints. One is written while training goes on; the next waits for it. Where the actor does not see
    this machine's disk, it writes on its own, and the checkpoint counts once it is here.

    note: tells the user something. `written` is the step of the newest whole one, 0 for none.
    """

    def __init__(
        self,
        config: OrchestratorConfig,
        backend: Backend,
        actor: WorkerHandle,
        store: RunStore,
        note: Callable[[str], None],
    ) -> None:
        self.config, self.backend, self.actor, self.store, self.note = config, backend, actor, store, note
        self.written = 0
        self.best: dict[str, Any] | None = None
        """Metric, value and step of the best one so far (`best_so_far`)."""
        self._best_before: dict[str, Any] | None = None
        self._writing: int | None = None

    def path(self) -> Path | None:
        """The newest complete checkpoint; None = there is none."""
        return self.store.checkpoint_path(self.written) if self.written else None

    def newest(self) -> int:
        """The step of the one that is being written, or of the newest whole one; 0 for none."""
        return self._writing or self.written

    async def write(
        self,
        step: int,
        state: dict[str, Any],
        metrics: dict[str, float],
        *,
        served: Path | None,
        last: bool,
        stopping: bool = False,
    ) -> None:
        """state: what training resumes from, besides the actor's part. metrics: of this step, for `best_metric`.
        served: file with the rollout workers' weights, where they are not the actor's. The last one is waited for.
        stopping: the run ends early, perhaps before what `best_metric` names was measured.

        Raises CheckpointError when it may not fail, and ConfigError for a `best_metric` there is not.
        """
        await self._finish(step, must=False)
        # On a thread, as whoever samples goes on meanwhile.
        await in_thread(self.store.flush)  # a checkpoint never knows of a step that the record does not
        self._update_best(step, metrics)
        self._writing = step
        try:
            await self.actor.call(
                "save_checkpoint",
                self._there(step),
                {"step": step, **state, "best": self.best},
                beside=not last,
                served=None if served is None else str(served),
            )
        except CheckpointError as error:
            self._failed(step, error, must=last)
            return
        if last:
            await self._finish(step, must=True)

    async def finish(self, step: int) -> None:
        """Wait for the one that is being written, the run's last. Raises CheckpointError."""
        await self._finish(step, must=True)

    async def _finish(self, step: int, *, must: bool) -> None:
        """Wait for the one that is being written, and delete those that are no longer wanted."""
        if self._writing is None:
            return
        try:
            await self.actor.call("finish_checkpoint")
            await bring(self.backend, self.actor, self._there(self._writing), self.store.checkpoint_path(self._writing))
        except CheckpointError as error:
            self._failed(step, error, must=must)
            return
        self.written, self._writing = self._writing, None
        self.store.event("checkpoint", str(self.store.checkpoint_path(self.written)), step=self.written)
        if self.config.training.save_total_limit is not None:
            protect = {self.best["step"]} if self.best else set()
            prune(self.store.folder, self.config.training.save_total_limit, protect)

    def _there(self, step: int) -> str:
        """Where the actor writes it."""
        path = self.store.checkpoint_path(step)
        return f"{self.backend.folder(self.store.folder, path.parent.name)}/{path.name}"

    def _failed(self, step: int, error: CheckpointError, *, must: bool) -> None:
        if self._writing is not None and self.best is not None and self.best["step"] == self._writing:
            self.best = self._best_before  # it is not there to be named
        self._writing = None
        self.store.event("checkpoint_failed", str(error), step=step)
        if must or self.config.training.checkpoint_errors == "stop":
            raise error
        self.note(f"step {step}: {error}. Going on without it (checkpoint_errors: continue)")

    def _update_best(self, step: int, metrics: dict[str, float]) -> None:
        self._best_before = self.best
        self.best = best_so_far(self.best, self.config.training.best_metric, step, metrics)


async def bring(backend: Backend, worker: WorkerHandle, there: str, here: Path) -> None:
    """Have a checkpoint that a worker has written here. Raises CheckpointError."""
    try:
        await backend.fetch(worker, there, here)
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {here} could not be brought here from {there} of {worker.name} ({error}); free space here, or "
            "choose another run_dir. Earlier checkpoints are as they were"
        ) from error


def best_so_far(
    best: dict[str, Any] | None, wanted: str | None, step: int, metrics: dict[str, float]
) -> dict[str, Any] | None:
    """Metric, value and step of the best checkpoint by `best_metric` (`wanted`), now that there is one of `step`.

    metrics: what was measured at this very step. Without the metric among them it is no candidate: no evaluation was
    due, or the step made no update. Raises ConfigError where it was due and there is no such metric.
    """
    if wanted is None:
        return best
    name, smaller = wanted.removeprefix("-"), wanted.startswith("-")
    if best is not None and (best["metric"], best.get("smaller", smaller)) != (name, smaller):
        best = None  # a resumed run may have another `best_metric`
    if name not in metrics:
        kind, _, _ = name.partition("/")
        measured = any(other.startswith(f"{kind}/") for other in metrics) or kind not in KINDS
        idle = kind == "train" and not metrics.get("train/tokens", 1.0)
        if best is None and measured and not idle:
            raise ConfigError(f"best_metric: there is no metric {name!r} at step {step}; known: {', '.join(metrics)}")
        return best
    value = metrics[name]
    if math.isnan(value) or (best is not None and (value >= best["value"] if smaller else value <= best["value"])):
        return best
    return {"metric": name, "smaller": smaller, "value": value, "step": step}
