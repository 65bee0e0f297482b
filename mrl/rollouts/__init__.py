"""Rollout sources: where experience comes from."""

from __future__ import annotations

import inspect
from typing import Any

from mrl.errors import ConfigError
from mrl.registry import Registry
from mrl.rollouts.base import BatchSource, MessagePolicy, PolicyClient, RolloutSource, SourceSetup, TurnLimits

ROLLOUT_SOURCES: Registry[type[RolloutSource] | type[BatchSource]] = Registry(
    "rollouts",
    "rollout_source",
    {
        "single_turn": "mrl.rollouts.single_turn:SingleTurn",
        "tools": "mrl.rollouts.tools.source:ToolSource",
        "rollout_func": "mrl.rollouts.function.source:FunctionSource",
        "openenv": "mrl.rollouts.openenv.source:OpenEnvSource",
        "evaluation_test": "mrl.processors.source:EvaluationSource",
    },
)


def check_source(name: str, options: dict[str, Any]) -> type[RolloutSource] | type[BatchSource]:
    """The source called `name`. Raises ConfigError for one there is not, and for options that it does not take."""
    member = ROLLOUT_SOURCES.get(name)
    known = list(inspect.signature(member.create).parameters)[1:]
    for option in options:
        if option not in known:
            raise ConfigError(
                f"rollout_options: rollout_source {name} has no option {option!r}; it has {', '.join(known) or 'none'}"
            )
    return member


__all__ = [
    "ROLLOUT_SOURCES",
    "BatchSource",
    "MessagePolicy",
    "PolicyClient",
    "RolloutSource",
    "SourceSetup",
    "TurnLimits",
    "check_source",
]
