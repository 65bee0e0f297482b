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
        TrainingConfig,
    )
    from mrl.errors import MRLError
    from mrl.trainer import MRLTrainer

__version__ = "0.1.0"

_WHERE = {
    "MRLTrainer": "mrl.trainer",
    "MRLError": "mrl.errors",
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
            "TrainingConfig",
        ],
        "mrl.config",
    ),
}

__all__ = [
    "AlgorithmConfig",
    "DataConfig",
    "GenerationConfig",
    "MRLError",
    "MRLTrainer",
    "ModelConfig",
    "OrchestratorConfig",
    "RewardConfig",
    "RunConfig",
    "RuntimeConfig",
    "TrainingConfig",
]


def __getattr__(name: str) -> Any:
    """Import on first use: `import mrl` stays fast and needs no extra."""
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'mrl' has no attribute {name!r}")
