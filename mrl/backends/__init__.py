"""Backends: where workers live."""

from __future__ import annotations

import inspect
from typing import Any

from mrl.backends.base import Backend, Resources, WorkerHandle
from mrl.errors import ConfigError
from mrl.registry import Registry

BACKENDS: Registry[type[Backend]] = Registry(
    "backends",
    "backend",
    {
        "inline": "mrl.backends.inline:InlineBackend",
        "ray": "mrl.backends.ray:RayBackend",
        "modal": "mrl.backends.modal:ModalBackend",
    },
)

__all__ = ["BACKENDS", "Backend", "Resources", "WorkerHandle", "check_backend", "make_backend"]

CALL_TIMEOUT = "call_timeout"


def make_backend(name: str, options: dict[str, Any], call_timeout: float) -> Backend:
    """The backend called `name`, with options of its own. Raises ConfigError for one that it has not."""
    return _with_known_options(name, options)(call_timeout, **options)


def check_backend(name: str, options: dict[str, Any], resources: list[Resources]) -> None:
    """Raise ConfigError when the backend cannot provide these workers. resources: what each of them needs."""
    _with_known_options(name, options).check(resources, **options)


def _with_known_options(name: str, options: dict[str, Any]) -> type[Backend]:
    backend = BACKENDS.get(name)
    accepted = list(inspect.signature(backend).parameters.values())
    known = [p.name for p in accepted if p.kind is not p.VAR_KEYWORD and p.name != CALL_TIMEOUT]
    for option in options:
        if option not in known:
            raise ConfigError(
                f"backend_options: backend {name!r} has no option {option!r}; it has {', '.join(known) or 'none'}"
            )
    return backend
