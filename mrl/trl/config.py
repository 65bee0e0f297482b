"""TRL's `GRPOConfig`: its names and defaults, those of 1.16, without TRL."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from typing import Any

from mrl.errors import ConfigError

OWN: dict[str, Any] = {
    "learning_rate": 1e-6,
    "logging_steps": 10,
    "gradient_checkpointing": True,
    "bf16": None,
    "lr_scheduler_kwargs": None,
    "use_liger_kernel": False,
    "torch_empty_cache_steps": None,
    "remove_unused_columns": False,
    # model and data
    "model_init_kwargs": None,
    "trust_remote_code": False,
    "router_aux_loss_coef": None,
    "disable_dropout": False,
    "cast_lm_head_to_fp32": False,
    "num_generations": 8,
    "num_generations_eval": None,
    "max_completion_length": 512,
    "ds3_gather_for_generation": True,
    "shuffle_dataset": True,
    "pad_to_multiple_of": "auto",
    # generation
    "generation_batch_size": None,
    "steps_per_generation": None,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": None,
    "generation_kwargs": None,
    "chat_template_kwargs": None,
    "repetition_penalty": 1.0,
    "cache_implementation": None,
    "use_transformers_continuous_batching": False,
    "transformers_continuous_batching_config": None,
    "use_transformers_paged": False,
    "max_tool_calling_iterations": None,
    # vLLM
    "use_vllm": False,
    "vllm_mode": "colocate",
    "vllm_model_impl": "vllm",
    "vllm_enable_sleep_mode": False,
    "vllm_structured_outputs_regex": None,
    "vllm_server_base_url": None,
    "vllm_server_host": "0.0.0.0",
    "vllm_server_port": 8000,
    "vllm_server_timeout": 240.0,
    "vllm_group_port": 51216,
    "vllm_gpu_memory_utilization": 0.3,
    "vllm_max_model_length": None,
    "vllm_tensor_parallel_size": 1,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
    "vllm_importance_sampling_clip_min": None,
    "vllm_importance_sampling_cap": None,
    # loss
    "beta": 0.0,
    "num_iterations": 1,
    "epsilon": 0.2,
    "delta": None,
    "epsilon_high": None,
    "sapo_temperature_neg": 1.05,
    "sapo_temperature_pos": 1.0,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
    "importance_sampling_level": "token",
    "reward_weights": None,
    "multi_objective_aggregation": "sum_then_normalize",
    "scale_rewards": "group",
    "loss_type": "dapo",
    "mask_truncated_completions": False,
    "sync_ref_model": False,
    "ref_model_mixup_alpha": 0.6,
    "ref_model_sync_steps": 512,
    "top_entropy_quantile": 1.0,
    "entropy_coef": 0.0,
    "use_adaptive_entropy": False,
    "entropy_coef_min": 0.0,
    "entropy_coef_max": 1.0,
    "entropy_coef_delta": 0.005,
    "entropy_target": 0.2,
    "off_policy_mask_threshold": None,
    "use_bias_correction_kl": True,
    # logging
    "log_completions": False,
    "log_multimodal": True,
    "num_completions_to_print": None,
    "log_unique_prompts": False,
    "log_completions_hub_repo": None,
}
"""What TRL adds to transformers' TrainingArguments, or gives another default."""
_FILLED_IN = (
    *("generation_batch_size", "accelerator_config", "disable_tqdm", "eval_steps", "fsdp", "fsdp_config"),
    *("parallelism_config", "label_names", "lr_scheduler_kwargs", "optim", "debug", "hub_strategy"),
    *("dataloader_pin_memory", "pad_to_multiple_of"),
)
"""What TRL's class works out by itself, so that nobody can tell whether it was given."""


@functools.cache
def defaults() -> dict[str, Any]:
    """Every option, with its default."""
    from transformers import TrainingArguments

    fields = [field for field in dataclasses.fields(TrainingArguments) if field.init]
    return {field.name: _default(field) for field in fields} | OWN


class GRPOConfig:
    """Options of a `GRPOTrainer`, by TRL's names. They may be set as attributes too.

    Raises TypeError for a name that TRL has not.
    """

    def __init__(self, output_dir: str | None = None, **options: Any) -> None:
        for name in options:
            if name not in defaults():
                raise TypeError(f"GRPOConfig has no argument {name!r}{_similar(name)}")
        self.__dict__.update(defaults() | options | {"output_dir": output_dir})

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in defaults():
            raise AttributeError(f"GRPOConfig has no option {name!r}{_similar(name)}")
        self.__dict__[name] = value

    def __repr__(self) -> str:
        changed = {name: value for name, value in vars(self).items() if value != defaults()[name]}
        return f"GRPOConfig({', '.join(f'{name}={value!r}' for name, value in changed.items())})"


def given(args: Any) -> dict[str, Any]:
    """Every option of a GRPOConfig, this one or TRL's own. Raises ConfigError for what is none."""
    if isinstance(args, GRPOConfig):
        return dict(vars(args))
    if type(args).__name__ != "GRPOConfig" or not dataclasses.is_dataclass(args):
        raise ConfigError(f"args: give a GRPOConfig, not an object of type {type(args).__name__}")
    values = {name: getattr(args, name, default) for name, default in defaults().items()}
    filled_in = {name: defaults()[name] for name in _FILLED_IN}
    filled_in |= {"bf16": None} if values["bf16"] else {}
    filled_in |= {"output_dir": None} if values["output_dir"] == "trainer_output" else {}
    return values | filled_in


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _similar(name: str) -> str:
    close = difflib.get_close_matches(name, defaults(), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
