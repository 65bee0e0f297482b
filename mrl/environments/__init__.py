"""Shipped environments: small, real, each written once.

An environment is plain Python in the form of `environment_factory` (docs/environments.md): `reset(**columns)`, methods
that are tools, `get_reward`. What serves it to others (`serve`) needs one thing more, `done`. Nothing here imports
torch, so that a server's process is small.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mrl.registry import Registry

ENVIRONMENTS: Registry[Callable[..., Any]] = Registry(
    "environments",
    "environment_factory",
    {
        "coding": "mrl.environments.coding:Coding",
        "echo": "mrl.environments.echo:Echo",
        "miniwob": "mrl.environments.miniwob.environment:MiniWoB",
        "number_guessing": "mrl.environments.number_guessing:NumberGuessing",
        "textarena": "mrl.environments.text_game:TextGame",
    },
)

__all__ = ["ENVIRONMENTS"]
