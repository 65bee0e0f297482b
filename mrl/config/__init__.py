"""Every option of a run, once: the same names in Python, YAML and on the command line.

`OrchestratorConfig` groups the options by concern. `MRLTrainer(**options)`, a recipe's top level and the command line's
flags use them flat (`learning_rate`, not `training.learning_rate`): no two sections share a field name. The sentence
under each field is its documentation and the command line's help.
"""

from mrl.config.algorithm import AlgorithmConfig
from mrl.config.data import DataConfig
from mrl.config.model import ModelConfig
from mrl.config.orchestrator import OrchestratorConfig, flat_fields, nest
from mrl.config.overlap import OverlapConfig
from mrl.config.recipe import load_recipe
from mrl.config.rollout import RolloutConfig
from mrl.config.running import GenerationConfig, RewardConfig, RunConfig, RuntimeConfig
from mrl.config.serving import ServingConfig
from mrl.config.simple import SimpleConfig
from mrl.config.training import TrainingConfig

__all__ = [
    "AlgorithmConfig",
    "DataConfig",
    "GenerationConfig",
    "ModelConfig",
    "OrchestratorConfig",
    "OverlapConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "RuntimeConfig",
    "ServingConfig",
    "SimpleConfig",
    "TrainingConfig",
    "flat_fields",
    "load_recipe",
    "nest",
]
