"""mrl post-trains language models by reinforcement learning.

from mrl import MRLTrainer
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mrl.config import (
        AlgorithmConfig,
        DataConfig,
        GenerationConfig,
        ModelConfig,
        OrchestratorConfig,
        RewardConfig,
        RunConfig,
        RuntimeConfig,
        SimpleConfig,
        TrainingConfig,
    )
    from mrl.errors import MRLError
    from mrl.rollouts.tools import MCPServer
    from mrl.trainer import MRLTrainer, train_simple

__version__ = "0.1.0"

_WHERE = {
    "MRLTrainer": "mrl.trainer",
    "train_simple": "mrl.trainer",
    "MRLError": "mrl.errors",
    "MCPServer": "mrl.rollouts.tools",
    **dict.fromkeys(
        [
            "AlgorithmConfig",
            "DataConfig",
            "GenerationConfig",
            "ModelConfig",
            "OrchestratorConfig",
            "RewardConfig",
            "RunConfig",
            "RuntimeConfig",
            "SimpleConfig",
            "TrainingConfig",
        ],
        "mrl.config",
    ),
}

__all__ = [
    "AlgorithmConfig",
    "DataConfig",
    "GenerationConfig",
    "MCPServer",
    "MRLError",
    "MRLTrainer",
    "ModelConfig",
    "OrchestratorConfig",
    "RewardConfig",
    "RunConfig",
    "RuntimeConfig",
    "SimpleConfig",
    "TrainingConfig",
    "train_simple",
]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    """Import on first use: `import mrl` stays fast and needs no extra."""
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'mrl' has no attribute {name!r}")
