"""`MRLTrainer(args=GRPOConfig(…))`: options by TRL's names, with its defaults, for scripts written for its trainer."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

from mrl.config.hints import named_elsewhere
from mrl.errors import ConfigError

SAME = frozenset(
    {
        *("max_steps", "learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay", "adam_beta1"),
        *("adam_beta2", "max_grad_norm", "seed", "gradient_checkpointing", "torch_compile", "use_liger_kernel"),
        *("run_name", "eval_steps", "save_steps", "save_total_limit", "report_to", "trust_remote_code"),
        *("num_generations", "max_completion_length", "temperature", "top_p", "top_k", "min_p", "beta"),
        *("num_iterations", "epsilon", "epsilon_high", "delta", "sapo_temperature_neg", "sapo_temperature_pos"),
        *("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg", "importance_sampling_level"),
        *("reward_weights", "scale_rewards", "loss_type", "mask_truncated_completions", "top_entropy_quantile"),
        *("entropy_coef", "use_bias_correction_kl"),
    }
)
"""Options that mean the same in both."""
DEFAULTS = {
    "learning_rate": 1e-6,
    "lr_scheduler_type": "linear",
    "num_generations": 8,
    "max_completion_length": 512,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3,
}
"""TRL's, where mrl's are others and the run would be another one."""
_SIZES = ("per_device_train_batch_size", "gradient_accumulation_steps", "generation_batch_size", "steps_per_generation")
_SAMPLER = ("use_vllm", "vllm_mode", "vllm_server_base_url", "vllm_server_host", "vllm_server_port")
"""Who samples is the run's `engine` here, and it serves the route itself."""
_FILLED_IN = ("bf16", "disable_tqdm", "accelerator_config", "dataloader_pin_memory", "debug", "pad_to_multiple_of")
"""Options of TRL's class that it sets by itself, so that nobody can tell whether they were given."""
_FILLED_IN_AS = {"output_dir": "trainer_output", "report_to": []}


class GRPOConfig:
    """Options by the names of TRL's class of this name, without TRL: `MRLTrainer(args=GRPOConfig(…))`."""

    def __init__(self, output_dir: str | None = None, **options: Any) -> None:
        self.__dict__.update(options if output_dir is None else {"output_dir": output_dir} | options)

    def __repr__(self) -> str:
        return f"GRPOConfig({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


def options_from(args: Any) -> dict[str, Any]:
    """mrl's options, by flat name. args: TRL's GRPOConfig, the one here, or a dict. Raises ConfigError for one without
    a meaning here."""
    given = _given(args)
    options: dict[str, Any] = {}
    for name, value in given.items():
        if name in SAME:
            options[name] = getattr(value, "value", value)  # an enum of transformers
        elif name == "output_dir":
            options["run_dir"] = str(value)
        elif name == "use_cpu":
            options |= {"device": "cpu"} if value else {}
        elif name not in (*_SIZES, *_SAMPLER, "num_train_epochs"):
            instead = named_elsewhere(name) or "mrl has nothing of the kind"
            raise ConfigError(f"args: {name}={value!r} is not taken over; {instead}")
    if said := [name for name in _SAMPLER if name in given]:
        warnings.warn(f"args: {', '.join(said)}: the run's own engine samples here (option engine)", stacklevel=4)
    asked = DEFAULTS | given
    options = {name: value for name, value in DEFAULTS.items() if name in SAME} | options
    options["num_epochs"] = _epochs(asked["num_train_epochs"])
    options["batch_size"] = _prompts(asked)
    return options


def _given(args: Any) -> dict[str, Any]:
    if isinstance(args, dict):
        found = dict(args)
    elif isinstance(args, GRPOConfig):
        found = dict(vars(args))
    elif dataclasses.is_dataclass(args) and not isinstance(args, type):
        found = {
            field.name: getattr(args, field.name)
            for field in dataclasses.fields(args)
            if field.name not in _FILLED_IN
            and getattr(args, field.name) not in (_default(field), _FILLED_IN_AS.get(field.name))
        }
    else:
        raise ConfigError(f"args: give a GRPOConfig, not a {type(args).__name__}")
    return {name: value for name, value in found.items() if value is not None}


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _epochs(given: Any) -> int:
    if int(given) != given:
        raise ConfigError(f"args: num_train_epochs={given}: mrl counts whole ones; say max_steps for a part")
    return int(given)


def _prompts(asked: dict[str, Any]) -> int:
    """Prompts of a step. TRL's sizes count completions; an update is on `gradient_accumulation_steps` parts."""
    per_part, parts = asked["per_device_train_batch_size"], asked["gradient_accumulation_steps"]
    rows, group = per_part * parts, asked["num_generations"]
    generated = asked.get("generation_batch_size", per_part * asked.get("steps_per_generation", parts))
    if generated != rows:
        raise ConfigError(
            f"args: {generated} completions are generated at a time and an update is on {rows}; mrl's are on all: "
            "leave out generation_batch_size and steps_per_generation"
        )
    if rows % group:
        raise ConfigError(
            f"args: an update is on {rows} completions (per_device_train_batch_size x "
            f"gradient_accumulation_steps), which num_generations={group} does not divide"
        )
    return int(rows // group)
