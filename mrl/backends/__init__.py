"""Backends: where workers live."""

from mrl.backends.base import Backend, Resources, WorkerHandle
from mrl.registry import Registry

BACKENDS: Registry[type[Backend]] = Registry("backends", "backend", {"inline": "mrl.backends.inline:InlineBackend"})

__all__ = ["BACKENDS", "Backend", "Resources", "WorkerHandle"]
