"""What a backend is: it puts workers somewhere and lets the orchestrator call them one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Resources:
    """What a worker needs; a backend that rents machines reads it."""

    gpu: str | None = None
    cpus: float = 1.0


class WorkerHandle(Protocol):
    """One worker, wherever it is."""

    name: str

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the worker. What the method raises is raised here; WorkerDied when it does not answer."""
        ...

    async def kill(self) -> None:
        """End it now."""
        ...

    async def alive(self) -> bool:
        """Whether it answers."""
        ...


class Backend(Protocol):
    """Implemented by one file per technology in this package."""

    shares_memory: bool
    """Whether actor and rollout workers may pass live modules to each other."""

    def __init__(self, call_timeout: float) -> None:
        """call_timeout: seconds after which an unanswered call counts as a dead worker."""
        ...

    async def spawn(self, worker: type, *, name: str, resources: Resources, args: dict[str, Any]) -> WorkerHandle:
        """Start `worker(**args)`."""
        ...

    async def close(self) -> None:
        """End every worker."""
        ...
