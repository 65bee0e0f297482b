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
    """Type of GPU; None = the worker computes on none."""
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

    def __init__(self, call_timeout: float, **options: Any) -> None:
        """call_timeout: seconds after which an unanswered call counts as a dead worker. options: the backend's own, by
        name in the signature (`backend_options`)."""
        ...

    @staticmethod
    def check(resources: list[Resources], **options: Any) -> None:
        """Raise ConfigError, before anything is started, for bad options or workers that it cannot provide."""
        ...

    async def spawn(self, worker: type, *, name: str, resources: Resources, args: dict[str, Any]) -> WorkerHandle:
        """Start `worker(**args)`, where what was registered in this process (mrl.registry.registrations) is registered
        too. What its constructor raises is raised here. Raises WorkerDied, and ConfigError for
        arguments that cannot be sent to where it lives."""
        ...

    async def put(self, path: Path) -> str:
        """Bring a local file or folder to where workers can read it, and return its path there."""
        ...

    async def close(self) -> None:
        """End every worker, and remove what `put` has copied."""
        ...
