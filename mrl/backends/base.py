"""What a backend is: it puts workers somewhere and lets the orchestrator call them one by one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

ENDING_SECONDS = 10.0
"""How long a worker may take over ending a call that is given up, and over ending itself."""


@dataclass(frozen=True)
class Resources:
    """What a worker needs. A backend that rents machines or places workers on them reads it; others use what is there.

    Everything can be pickled.
    """

    gpu: str | None = None
    """Type of GPU; "any" = the backend's choice, which may be none; None = the worker computes on none."""
    gpus: int = 0
    """How many of that type."""
    cpus: float = 1.0
    memory_mb: int | None = None
    """Of main memory; None = the backend's own default."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that the worker's process has beside those of its backend."""


class WorkerHandle(Protocol):
    """One worker, wherever it is."""

    name: str

    async def call(self, method: str, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """Call a method of the worker. What the method raises is raised here.

        Asynchronous methods run side by side, blocking ones one after the other in the order of their calls. timeout:
        seconds; None = the backend's `call_timeout`. Raises WorkerDied, with the worker's name, when the worker is
        gone, is ended meanwhile, or has not answered in time. A call never takes longer than that and the time an
        asynchronous method is given to end (`ENDING_SECONDS`).

        Cancelling the task that awaits it reaches the worker, and so does the deadline: an asynchronous method is
        cancelled there, and has ended when this returns. A blocking method that has begun cannot be stopped: it keeps
        its place until it returns, and blocking calls made after it wait for that.
        """
        ...

    async def kill(self) -> None:
        """End it now: every call raises WorkerDied from here on, those in flight included."""
        ...

    async def alive(self) -> bool:
        """Whether it answers. A worker that missed a deadline counts as dead."""
        ...


class Backend(Protocol):
    """Implemented by one file per technology in this package."""

    shares_memory: bool
    """Whether actor and rollout workers may pass live modules to each other."""
    shares_disk: bool
    """Whether workers see this process's files, under the same paths."""
    common_disk: bool
    """Whether what a worker writes in `folder` is there for the others too."""
    sync_method: str
    """The `weight_sync_method` of runs that name none."""

    def __init__(self, call_timeout: float, **options: Any) -> None:
        """call_timeout: seconds after which an unanswered call counts as a dead worker. options: the backend's own, by
        name in the signature (`backend_options`)."""
        ...

    @staticmethod
    def check(resources: list[Resources], **options: Any) -> None:
        """Raise ConfigError, before anything is started, for bad options or workers that it cannot provide."""
        ...

    def price(self, name: str, resources: Resources) -> float | None:
        """Dollars per hour that a worker of this name costs from its start to its end; None = nothing that is known
        here. Asks nobody. Raises ConfigError for what the backend does not provide."""
        ...

    def spent(self) -> float | None:
        """Dollars that this backend's workers have cost so far; None where it knows no prices."""
        ...

    async def reserve(self, workers: Mapping[str, Resources]) -> None:
        """Before the first of a run's workers is spawned: what all of them need, by name, so that they get it together
        or not at all. Raises ConfigError when there is not that much. Others may be spawned besides."""
        ...

    async def spawn(self, worker: type, *, name: str, resources: Resources, args: dict[str, Any]) -> WorkerHandle:
        """Start `worker(**args)`, where what was registered in this process (mrl.registry.registrations) is registered
        too. What its constructor raises is raised here. Raises WorkerDied, and ConfigError for
        arguments that cannot be sent to where it lives."""
        ...

    async def put(self, path: Path) -> str:
        """Bring a local file or folder to where workers can read it, and return its path there."""
        ...

    def folder(self, run_dir: Path, name: str) -> str:
        """Where workers write what belongs into the folder `name` of a run: that one, where they share the disk."""
        ...

    async def fetch(self, worker: WorkerHandle, there: str, here: Path) -> None:
        """Bring a folder that a worker has written below `folder` to a path here, whole or not at all; there it may be
        gone afterwards. Does nothing where the disk is shared. Raises OSError and WorkerDied."""
        ...

    def scorers(self) -> Backend:
        """The backend of workers that score: this one, or that of the process which runs the loop."""
        ...

    def takes_loop(self, reward_funcs: Any) -> bool:
        """Whether the run's loop is to be where the workers are too, and this process only waits for it
        (mrl.loop.elsewhere). reward_funcs: the option."""
        ...

    async def close(self) -> None:
        """End every worker, and remove what `put` has copied."""
        ...
