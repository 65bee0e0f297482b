"""`ray`: every worker is an actor of a Ray cluster, on this machine or on many."""

from mrl.backends.ray.backend import RayBackend

__all__ = ["RayBackend"]
