"""What an actor of several ranks does not do, told before anything is loaded."""

from __future__ import annotations

from mrl.config.model import ModelConfig
from mrl.config.section import changed_options
from mrl.config.training import TrainingConfig
from mrl.errors import ConfigError

NOT_SHARDED = {
    "torch_compile": "compiled layers do not gather their weights",
    "offload_optimizer": "it divides the optimizer's state among the GPUs already",
    "use_liger_kernel": "its layers are loaded in host memory, where Liger's kernels do not run",
}
"""Options that `fsdp` does not take, and why."""


def check_ranks(training: TrainingConfig, model: ModelConfig, ranks: int) -> None:
    """Raise ConfigError for options that an actor of so many ranks does not take."""
    if ranks == 1:
        return
    if model.device == "mps":
        raise ConfigError("device: mps has no way to several processes; use cpu, or one process")
    if training.actor_parallelism == "fsdp":
        for name in changed_options(training, tuple(NOT_SHARDED)):
            raise ConfigError(
                f"{name}: actor_parallelism fsdp does not take it ({NOT_SHARDED[name]}); use ddp, or leave {name} out"
            )
