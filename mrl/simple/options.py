"""What every option of mrl means to each of TRL's trainers: the same, nothing, or a refusal.

An option is in `MEANINGS` with the trainers it means something to. One that is not there, or not for the chosen
trainer, must keep its default: nothing is accepted and ignored.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mrl.config import OrchestratorConfig, OverlapConfig, RolloutConfig, ServingConfig, flat_fields
from mrl.errors import ConfigError
from mrl.simple.trainers import TrainerSpec

RL = frozenset({"grpo", "rloo"})
ONLINE = RL | {"online_dpo"}
OFFLINE = frozenset({"sft", "dpo", "kto", "reward"})
ALL = ONLINE | OFFLINE
GRPO_ONLY = frozenset({"grpo"})

TRL_LOSSES = {
    **{name: name for name in ("bnpo", "cispo", "dapo", "dr_grpo", "grpo", "luspo", "sapo", "vespo")},
    "gspo": "grpo",
}
"""Losses that TRL has with the same formula, and its names of them; `gspo` is `grpo` with a sequence's ratio."""
SEQUENCE_LOSSES = ("gspo", "luspo")
"""Those whose ratio is a sequence's where `importance_sampling_level` does not say."""
AGGREGATION = {"group": "sum_then_normalize", "gdpo": "normalize_then_sum"}
"""Advantages that TRL's GRPO has, and what it calls them."""
CISPO_EPSILON_HIGH = 5.0
"""What `epsilon_high: null` means for cispo here; in TRL it would be `epsilon`."""
GRPO_OPTIONS = (
    *("delta", "sapo_temperature_pos", "sapo_temperature_neg", "top_entropy_quantile", "entropy_coef"),
    *("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg", "use_bias_correction_kl"),
)
"""Options of the same name and meaning in TRL's GRPO."""


@dataclass(frozen=True)
class Meaning:
    """What an option means in simple mode."""

    trainers: frozenset[str]
    """To which of TRL's trainers it means something."""
    to_trl: tuple[str, ...] = ()
    """The options of TRL's configuration it is written to; none = mrl itself acts on it, as in orchestrated mode."""
    also: tuple[Any, ...] = ()
    """Values besides the default that say what the trainer does anyway."""
    advice: str = ""
    """What to do instead."""


def _mrl(names: str, trainers: frozenset[str] = ALL) -> dict[str, Meaning]:
    return {name: Meaning(trainers) for name in names.split()}


MEANINGS: dict[str, Meaning] = {
    **_mrl("mode algorithm trl_args"),
    # The model, the tasks, the place and the record are mrl's own in both modes.
    **_mrl("model revision use_lora lora_r lora_alpha lora_dropout lora_target_modules"),
    "trust_remote_code": Meaning(ALL, ("trust_remote_code",)),
    "dtype": Meaning(ALL, ("bf16", "fp16")),
    "device": Meaning(ALL, ("use_cpu",)),
    "max_model_len": Meaning(ALL, ("max_length",)),
    **_mrl("train_dataset dataset_name dataset_config dataset_split prompt_column rename max_samples"),
    **_mrl("prompt_format system_prompt"),
    "shuffle": Meaning(ALL, ("shuffle_dataset", "train_sampling_strategy")),
    **_mrl("eval_dataset eval_split eval_samples", ALL - {"online_dpo"}),
    "eval_steps": Meaning(
        ALL - {"online_dpo"}, ("eval_strategy", "eval_steps", "eval_on_start", "num_generations_eval")
    ),
    **_mrl(
        "reward_funcs reward_timeout reward_trial sandbox sandbox_options sandbox_timeout sandbox_memory_mb", ONLINE
    ),
    "reward_weights": Meaning(ONLINE, ("reward_weights",)),
    **_mrl("backend call_timeout actor_gpu"),
    **_mrl("run_dir run_name resume allow_change"),
    "report_to": Meaning(ALL, ("report_to",)),
    "log_completions": Meaning(ONLINE, ("log_completions",)),
    "save_steps": Meaning(ALL, ("save_strategy", "save_steps")),
    "save_total_limit": Meaning(ALL, ("save_total_limit",)),
    "best_metric": Meaning(ALL, ("load_best_model_at_end", "metric_for_best_model", "greater_is_better")),
    "checkpoint_errors": Meaning(ALL),
    "max_failed_fraction": Meaning(
        RL, advice="TRL's online DPO would take a completion without a reward for one of 0, so the first one stops it"
    ),
    # The optimiser.
    "learning_rate": Meaning(ALL, ("learning_rate",)),
    "lr_scheduler_type": Meaning(ALL, ("lr_scheduler_type",)),
    "warmup_steps": Meaning(ALL, ("warmup_steps",)),
    "weight_decay": Meaning(ALL, ("weight_decay",)),
    "adam_beta1": Meaning(ALL, ("adam_beta1",)),
    "adam_beta2": Meaning(ALL, ("adam_beta2",)),
    "max_grad_norm": Meaning(ALL, ("max_grad_norm",)),
    "max_steps": Meaning(ALL, ("max_steps",)),
    "num_epochs": Meaning(ALL, ("num_train_epochs",)),
    "batch_size": Meaning(
        ALL,
        ("per_device_train_batch_size", "per_device_eval_batch_size", "generation_batch_size", "steps_per_generation"),
    ),
    "gradient_accumulation_steps": Meaning(ALL, ("gradient_accumulation_steps",)),
    "gradient_checkpointing": Meaning(ALL, ("gradient_checkpointing",)),
    "seed": Meaning(ALL, ("seed", "data_seed")),
    # The group and the loss.
    "num_generations": Meaning(RL, ("num_generations",), advice="TRL's online DPO compares two completions"),
    "num_iterations": Meaning(RL, ("num_iterations",)),
    "epsilon": Meaning(RL, ("epsilon",)),
    "epsilon_high": Meaning(RL, ("epsilon_high",)),
    "loss_type": Meaning(GRPO_ONLY, ("loss_type",), advice="the trainer's own losses are in trl_args: loss_type"),
    **{name: Meaning(GRPO_ONLY, (name,)) for name in GRPO_OPTIONS},
    "importance_sampling_level": Meaning(GRPO_ONLY, ("importance_sampling_level",)),
    "advantage_type": Meaning(
        GRPO_ONLY, ("multi_objective_aggregation",), advice="TRL's GRPO has group and gdpo; rloo is algorithm: rloo"
    ),
    "scale_rewards": Meaning(GRPO_ONLY, ("scale_rewards",), advice="rloo has trl_args: normalize_advantages"),
    "beta": Meaning(RL, ("beta",), advice="this trainer's beta is another thing: trl_args: beta"),
    "mask_truncated_completions": Meaning(RL, ("mask_truncated_completions",)),
    "importance_sampling": Meaning(
        frozenset(), also=("none",), advice="TRL corrects only for vLLM's sampling (trl_args: vllm_importance_…)"
    ),
    "importance_sampling_cap": Meaning(frozenset(), advice="TRL corrects only for vLLM's sampling"),
    "importance_sampling_floor": Meaning(frozenset(), advice="TRL corrects only for vLLM's sampling"),
    "max_logprob_gap": Meaning(frozenset(), advice="TRL samples with the trainer's own weights and logprobs"),
    "normalize_advantages": Meaning(frozenset(), advice="TRL's rloo has trl_args: normalize_advantages"),
    "kl_in": Meaning(frozenset(), advice="TRL's grpo has it in the loss, its rloo in the reward"),
    "kl_estimator": Meaning(frozenset(), advice="TRL's grpo takes k3, its rloo k1"),
    "discount": Meaning(frozenset(), advice="TRL has no step rewards"),
    **{
        name: Meaning(frozenset(), advice="TRL trains on every group")
        for name in ("zero_variance_groups", "max_resamples")
    },
    **{
        name: Meaning(frozenset(), advice="TRL has it as a reward function: trl.rewards")
        for name in ("soft_punish_cache", "overlong_penalty", "length_penalty")
    },
    # The sampling.
    "max_completion_length": Meaning(ONLINE, ("max_completion_length", "max_new_tokens")),
    "max_tokens": Meaning(ONLINE, ("generation_kwargs",)),
    "temperature": Meaning(ONLINE, ("temperature",)),
    "top_p": Meaning(ONLINE, ("top_p",)),
    "top_k": Meaning(ONLINE, ("top_k",)),
    "min_p": Meaning(ONLINE, ("min_p",)),
    "stop": Meaning(frozenset(), advice="TRL cannot end a completion at a string"),
    "max_decode_rows": Meaning(frozenset(), advice="TRL decodes a whole batch at once"),
    "decode_step": Meaning(frozenset(), advice="TRL decodes with model.generate"),
    # The update: TRL pads, and cuts by count.
    "max_tokens_per_micro_batch": Meaning(frozenset(), advice="TRL cuts by number: gradient_accumulation_steps"),
    "packing": Meaning(frozenset(), advice="TRL pads; its SFT has trl_args: packing"),
    "torch_compile": Meaning(ALL, ("torch_compile",)),
    "use_liger_kernel": Meaning(frozenset(), advice="TRL's own, losses included, is trl_args: use_liger_kernel"),
    "offload_optimizer": Meaning(frozenset(), advice="TRL's optimizers are chosen by trl_args: optim"),
    # Where things run: the trainer samples from the very module it trains.
    "engine": Meaning(frozenset(), advice="TRL generates with transformers (trl_args: use_vllm for vLLM)"),
    "num_rollout_workers": Meaning(frozenset(), also=(1,), advice="the trainer generates by itself"),
    "rollout_gpu": Meaning(frozenset(), advice="the trainer generates by itself, on actor_gpu"),
    "weight_sync_method": Meaning(frozenset(), also=("direct",), advice="the trainer samples from its own weights"),
    "sync_weights_every": Meaning(frozenset(), advice="the trainer samples from its own weights"),
    **{
        name: Meaning(frozenset(), advice="TRL has options of its own for vLLM: trl_args: vllm_…")
        for name in ServingConfig.model_fields
    },
    **{
        name: Meaning(frozenset(), advice="TRL's trainers make their rollouts by themselves")
        for name in RolloutConfig.model_fields
    },
    **{
        name: Meaning(frozenset(), advice="TRL's trainers generate and train in turn")
        for name in OverlapConfig.model_fields
    },
    **{
        name: Meaning(frozenset(), advice="the trainer samples from its own weights")
        for name in ("weight_sync_dir", "delta_over", "delta_full_every", "sync_timeout", "max_worker_restarts")
    },
}

OWN_TRL_OPTIONS = {
    **dict.fromkeys(("output_dir", "logging_dir", "hub_model_id", "push_to_hub", "run_name"), "run_dir"),
    **dict.fromkeys(
        (
            "logging_steps",
            "logging_strategy",
            "logging_first_step",
            "logging_nan_inf_filter",
            "disable_tqdm",
            "project",
        ),
        "report_to",
    ),
    **dict.fromkeys(("model_init_kwargs", "quantization_config"), "model, dtype, revision"),
    **dict.fromkeys(("do_train", "do_eval", "do_predict", "per_gpu_eval_batch_size"), "eval_split"),
    **dict.fromkeys(("resume_from_checkpoint", "save_only_model", "restore_callback_states_from_checkpoint"), "resume"),
    **dict.fromkeys(("remove_unused_columns", "log_completions_hub_repo", "num_completions_to_print"), "run_dir"),
    **dict.fromkeys(("warmup_ratio",), "warmup_steps"),
}
"""TRL's options that the record and the checkpoints depend on, and what says it in mrl."""


def check_options(config: OrchestratorConfig, spec: TrainerSpec, meanings: dict[str, Meaning] | None = None) -> None:
    """Raises ConfigError naming the first option that was changed and means nothing to this trainer."""
    meanings = MEANINGS if meanings is None else meanings
    values = config.flat()
    for name, (_, field) in flat_fields().items():
        meaning = meanings.get(name, Meaning(frozenset()))
        default = field.get_default(call_default_factory=True)
        if spec.name in meaning.trainers or values[name] == default or values[name] in meaning.also:
            continue
        advice = f" ({meaning.advice})" if meaning.advice else ""
        raise ConfigError(
            f"{name}: {values[name]!r} has no meaning with mode: simple and algorithm: {spec.name}{advice}; leave it "
            f"at {default!r}, or use mode: orchestrated"
        )
    _check_batch(values, spec)
    if spec.online:
        _check_sampling(config, values)
    if spec.name == "grpo":
        _check_loss(values)
    if values["device"].partition(":")[2] not in ("", "0"):
        raise ConfigError(
            f"device: TRL's trainers take the first device they see, not {values['device']!r}; "
            f"set CUDA_VISIBLE_DEVICES={values['device'].partition(':')[2]} and use device: cuda"
        )


def notices(config: OrchestratorConfig, spec: TrainerSpec, tasks: int) -> list[str]:
    """Where TRL's loop differs from mrl's without an option to say so."""
    values, notes = config.flat(), []
    if spec.online and _is_cut(values):
        notes.append(
            "top_p, top_k or min_p cut the sampled distribution and TRL's trainer does not correct for it: the policy "
            "gradient is biased. Sample from everything (top_p: 1), or use mode: orchestrated."
        )
    if spec.name in RL and tasks % values["batch_size"]:
        notes.append(
            f"TRL leaves out the last, smaller batch of an epoch: {tasks % values['batch_size']} of {tasks} tasks each."
        )
    if spec.name == "kto" and values["shuffle"] and "shuffle" in _given(config):
        notes.append("shuffle: KTO compares neighbours, so the order is shuffled once and the same in every epoch.")
    return notes


def trl_options(config: OrchestratorConfig, spec: TrainerSpec, facts: TrainerFacts) -> dict[str, Any]:
    """The keyword arguments of the trainer's configuration, `trl_args` included. Raises ConfigError for those."""
    known = {field.name for field in dataclasses.fields(spec.load("config"))}
    values = config.flat()
    own = {name: value for name, value in _written(values, spec, facts).items() if name in known}
    return own | _checked_args(values["trl_args"], spec, known, own)


def owned_by(name: str, spec: TrainerSpec) -> str | None:
    """mrl's option that says what TRL's option `name` says to this trainer, or None."""
    for option, meaning in MEANINGS.items():
        if name in meaning.to_trl and spec.name in meaning.trainers:
            return option
    return OWN_TRL_OPTIONS.get(name)


@dataclass(frozen=True)
class TrainerFacts:
    """What the mapping needs besides the options."""

    output_dir: str
    bf16: bool
    use_cpu: bool
    context: int
    """Tokens that prompt and completion may have together."""
    evaluates: bool


# --- the mapping ----------------------------------------------------------------------------------------------------


def _written(values: dict[str, Any], spec: TrainerSpec, facts: TrainerFacts) -> dict[str, Any]:
    """Every option for TRL, whether this trainer's configuration has it or not."""
    same = (
        *("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "max_grad_norm", "gradient_checkpointing"),
        *("trust_remote_code", "gradient_accumulation_steps", "seed", "torch_compile"),
    )
    updates = values["num_iterations"] if spec.name in RL else 1
    micro_batch = _examples_per_step(values, spec) // values["gradient_accumulation_steps"]
    written: dict[str, Any] = {name: values[name] for name in same}
    written |= {
        "output_dir": facts.output_dir,
        "bf16": facts.bf16,
        "fp16": False,
        "use_cpu": facts.use_cpu,
        "data_seed": values["seed"],
        "shuffle_dataset": values["shuffle"],
        # KTO compares neighbours and insists on one order; its rows are shuffled before (see `examples_dataset`).
        "train_sampling_strategy": "random" if values["shuffle"] and spec.name != "kto" else "sequential",
        # With `constant`, too, warm-up may come first.
        "lr_scheduler_type": {"constant": "constant_with_warmup"}.get(
            values["lr_scheduler_type"], values["lr_scheduler_type"]
        ),
        "warmup_steps": values["warmup_steps"] * updates,
        "max_steps": values["max_steps"] * updates if values["max_steps"] > 0 else -1,
        "num_train_epochs": values["num_epochs"],
        "per_device_train_batch_size": micro_batch,
        "per_device_eval_batch_size": micro_batch,
        "eval_on_start": facts.evaluates,
        "eval_strategy": "steps" if facts.evaluates else "no",
        # TRL's steps are updates. Without eval_steps, only the end is evaluated: see `Recorder`.
        "eval_steps": values["eval_steps"] * updates or None,
        "save_strategy": "no",  # mrl says when
        "report_to": "none",
        "logging_strategy": "steps",
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "disable_tqdm": True,
    }
    if facts.evaluates and not values["eval_steps"]:
        written |= {"eval_steps": 2**31 - 1}
    if spec.online:
        written |= _sampling(values, spec)
    else:
        written["max_length"] = facts.context
    if spec.name in RL:
        written |= {
            name: values[name]
            for name in ("num_generations", "num_iterations", "epsilon", "beta", "mask_truncated_completions")
        }
        written |= {"epsilon_high": _epsilon_high(values, spec), "num_generations_eval": 1}
    if spec.name == "grpo":
        written |= {name: values[name] for name in ("scale_rewards", *GRPO_OPTIONS)}
        written |= {
            "loss_type": TRL_LOSSES[values["loss_type"]],
            "importance_sampling_level": values["importance_sampling_level"]
            or ("sequence" if values["loss_type"] in SEQUENCE_LOSSES else "token"),
            "multi_objective_aggregation": AGGREGATION[values["advantage_type"]],
        }
    if spec.name == "online_dpo":
        written["max_length"] = facts.context
    return written


def _sampling(values: dict[str, Any], spec: TrainerSpec) -> dict[str, Any]:
    limit = min(values["max_tokens"] or values["max_completion_length"], values["max_completion_length"])
    written = {
        "temperature": values["temperature"],
        "top_p": values["top_p"],
        "top_k": values["top_k"],
        "min_p": values["min_p"] or None,
        "max_completion_length": values["max_completion_length"],
        "max_new_tokens": limit,
    }
    if spec.name in RL and limit < values["max_completion_length"]:
        written["generation_kwargs"] = {"max_new_tokens": limit}
    return written


def _epsilon_high(values: dict[str, Any], spec: TrainerSpec) -> float | None:
    if spec.name == "grpo" and values["loss_type"] == "cispo" and values["epsilon_high"] is None:
        return CISPO_EPSILON_HIGH
    return values["epsilon_high"]


def _examples_per_step(values: dict[str, Any], spec: TrainerSpec) -> int:
    """Rows of the trainer's batch: rollouts where a step has groups of them, else prompts or examples."""
    return values["batch_size"] * (values["num_generations"] if spec.name in RL else 1)


def _checked_args(args: dict[str, Any], spec: TrainerSpec, known: Iterable[str], own: dict[str, Any]) -> dict[str, Any]:
    for name in args:
        if name not in known:
            close = difflib.get_close_matches(name, list(known), n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"trl_args: {spec.config.partition(':')[2]} has no option {name!r}{hint}")
        option = owned_by(name, spec)
        if option is not None or name in own:
            raise ConfigError(f"trl_args: {name} is set by mrl's own option {option or name}; use that one")
    return args


# --- combinations ---------------------------------------------------------------------------------------------------


def _check_batch(values: dict[str, Any], spec: TrainerSpec) -> None:
    rows, parts = _examples_per_step(values, spec), values["gradient_accumulation_steps"]
    if rows % parts:
        fitting = max(part for part in range(1, parts) if rows % part == 0)
        what = "batch_size × num_generations" if spec.name in RL else "batch_size"
        raise ConfigError(
            f"gradient_accumulation_steps: TRL splits a step into equal parts, and {parts} does not divide {what} = "
            f"{rows}; use {fitting}"
        )


def _check_sampling(config: OrchestratorConfig, values: dict[str, Any]) -> None:
    if values["temperature"] == 0:
        raise ConfigError("temperature: 0 always samples the same tokens, so there is nothing to learn from; use 1.0")
    sampled, trained = config.sampled_tokens, config.algorithm.max_completion_length
    if sampled > trained:
        raise ConfigError(
            f"max_tokens: TRL trains on everything it samples, so {sampled} cannot be above max_completion_length "
            f"({trained}); use {trained}"
        )
    if "importance_sampling" in _given(config) and values["importance_sampling"] != "none" and _is_cut(values):
        raise ConfigError(
            f"importance_sampling: {values['importance_sampling']} cannot be had with mode: simple, where TRL does not "
            "correct for top_p, top_k or min_p; sample from everything (top_p: 1), or set importance_sampling: none"
        )


def _check_loss(values: dict[str, Any]) -> None:
    if values["loss_type"] not in TRL_LOSSES:
        raise ConfigError(
            f"loss_type: TRL has no {values['loss_type']!r} that is the same as mrl's; use one of "
            f"{', '.join(TRL_LOSSES)}, or mode: orchestrated"
        )
    if values["advantage_type"] not in AGGREGATION:
        raise ConfigError(
            f"advantage_type: TRL's GRPO has no {values['advantage_type']!r}; use group or gdpo, or mode: orchestrated"
        )
    if values["loss_type"] == "bnpo" and values["gradient_accumulation_steps"] > 1:
        raise ConfigError(
            "gradient_accumulation_steps: TRL's bnpo normalises each part of a step by itself, so the loss depends on "
            "how many there are; use loss_type: dapo, which is the same for any number, or 1"
        )


def _is_cut(values: dict[str, Any]) -> bool:
    return bool(values["top_p"] < 1 or values["top_k"] or values["min_p"])


def _given(config: OrchestratorConfig) -> set[str]:
    """Options the user wrote; of a resumed run, those that are not at their defaults."""
    return {name for section in type(config).model_fields for name in getattr(config, section).model_fields_set}
