"""What every option of mrl means to TRL's trainers: a row for each, by subject.

    by_mrl     mrl itself acts on it, as in orchestrated mode
    same       TRL has it, under the same name and with the same meaning
    becomes    TRL says it in other words: each of its options beside what that is set to (left_alone: to nothing)
    nothing    TRL has no such thing; beside it, what to do instead

A row counts for all trainers unless it names some (ONLINE: those that generate; RL: grpo and rloo). It may name options
of TRL's that only some of these trainers have: what a trainer's configuration does not know is not written to it.
"""

from __future__ import annotations

from typing import Any

from mrl.config import OverlapConfig, RolloutConfig, ServingConfig
from mrl.simple.option_rows import Meanings, TrainerRun, becomes, by_mrl, left_alone, nothing, same
from mrl.simple.trainers import ALL, GRPO_ONLY, ONLINE, RL

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
NEVER = 2**31 - 1
"""A step that no run reaches."""


def _sampling_order(run: TrainerRun) -> str:
    # KTO compares neighbours and insists on one order; its rows are shuffled before (see `examples_dataset`).
    return "random" if run["shuffle"] and run.spec.name != "kto" else "sequential"


def _schedule(run: TrainerRun) -> str:
    # With `constant`, too, warm-up may come first.
    chosen: str = run["lr_scheduler_type"]
    return "constant_with_warmup" if chosen == "constant" else chosen


def _eval_steps(run: TrainerRun) -> int | None:
    # To TRL a step is an update. Without eval_steps, only the end is evaluated: see `Recorder`.
    steps: int = run["eval_steps"] * run.updates
    return steps or (NEVER if run.facts.evaluates else None)


def _epsilon_high(run: TrainerRun) -> float | None:
    is_cispo = run.spec.name == "grpo" and run["loss_type"] == "cispo"
    given: float | None = run["epsilon_high"]
    return CISPO_EPSILON_HIGH if is_cispo and given is None else given


def _ratio_level(run: TrainerRun) -> str:
    chosen: str | None = run["importance_sampling_level"]
    return chosen or ("sequence" if run["loss_type"] in SEQUENCE_LOSSES else "token")


def _generation_kwargs(run: TrainerRun) -> dict[str, Any] | None:
    cut_earlier = run.spec.name in RL and run.token_limit < run["max_completion_length"]
    return {"max_new_tokens": run.token_limit} if cut_earlier else None


THE_RUN: Meanings = {
    **by_mrl("mode algorithm trl_args"),
    **by_mrl("backend backend_options call_timeout actor_gpu max_worker_restarts max_cost"),
    **by_mrl("run_dir run_name resume allow_change checkpoint_errors"),
    **becomes("report_to", report_to=lambda run: "none"),
    **becomes("log_completions", ONLINE, log_completions=left_alone),
    **becomes("save_steps", save_strategy=lambda run: "no", save_steps=left_alone),
    **becomes("save_total_limit", save_total_limit=left_alone),
    **becomes(
        "best_metric",
        load_best_model_at_end=left_alone,
        metric_for_best_model=left_alone,
        greater_is_better=left_alone,
    ),
    **by_mrl(
        "max_failed_fraction",
        RL,
        advice="TRL's online DPO would take a completion without a reward for one of 0, so the first one stops it",
    ),
}

MODEL_AND_DATA: Meanings = {
    **by_mrl("model revision use_lora lora_r lora_alpha lora_dropout lora_target_modules"),
    **same("trust_remote_code"),
    **becomes("dtype", bf16=lambda run: run.facts.bf16, fp16=lambda run: False),
    **becomes("device", use_cpu=lambda run: run.facts.use_cpu),
    **becomes("max_model_len", max_length=lambda run: run.facts.context),
    **by_mrl("train_dataset dataset_name dataset_config dataset_split prompt_column rename max_samples"),
    **by_mrl("prompt_format system_prompt"),
    **becomes(
        "chat_template_kwargs",
        RL,
        chat_template_kwargs=lambda run: run["chat_template_kwargs"] or None,
        advice="only grpo and rloo hand them to the template",
    ),
    **becomes("shuffle", shuffle_dataset=lambda run: run["shuffle"], train_sampling_strategy=_sampling_order),
    **by_mrl("eval_dataset eval_split eval_samples", ALL - {"online_dpo"}),
    **becomes(
        "eval_steps",
        ALL - {"online_dpo"},
        eval_strategy=lambda run: "steps" if run.facts.evaluates else "no",
        eval_steps=_eval_steps,
        eval_on_start=lambda run: run.facts.evaluates,
        num_generations_eval=lambda run: 1,
    ),
}

REWARDS: Meanings = {
    **by_mrl("reward_funcs reward_timeout reward_trial reward_processing_classes", ONLINE),
    **by_mrl("sandbox sandbox_options sandbox_timeout sandbox_memory_mb", ONLINE),
    **becomes("reward_weights", ONLINE, reward_weights=left_alone),
    **nothing("soft_punish_cache overlong_penalty length_penalty", "TRL has it as a reward function: trl.rewards"),
}

OPTIMIZER: Meanings = {
    **same("learning_rate weight_decay adam_beta1 adam_beta2 max_grad_norm"),
    **same("gradient_accumulation_steps gradient_checkpointing torch_compile"),
    **becomes("lr_scheduler_type", lr_scheduler_type=_schedule),
    **becomes("warmup_steps", warmup_steps=lambda run: run["warmup_steps"] * run.updates),
    **becomes("max_steps", max_steps=lambda run: run["max_steps"] * run.updates if run["max_steps"] > 0 else -1),
    **becomes("num_epochs", num_train_epochs=lambda run: run["num_epochs"]),
    **becomes(
        "batch_size",
        per_device_train_batch_size=lambda run: run.micro_batch,
        per_device_eval_batch_size=lambda run: run.micro_batch,
        generation_batch_size=left_alone,
        steps_per_generation=left_alone,
    ),
    **becomes("seed", seed=lambda run: run["seed"], data_seed=lambda run: run["seed"]),
    **nothing("max_tokens_per_micro_batch", "TRL cuts by number: gradient_accumulation_steps"),
    **nothing("packing", "TRL pads; its SFT has trl_args: packing"),
    **nothing("use_liger_kernel", "TRL's own, losses included, is trl_args: use_liger_kernel"),
    **nothing("actor_parallelism ddp_timeout", "its trainer runs in one process"),
    **nothing("offload_optimizer", "TRL's optimizers are chosen by trl_args: optim"),
}

LOSS: Meanings = {
    **same("num_generations", RL, advice="TRL's online DPO compares two completions"),
    **same("num_iterations epsilon mask_truncated_completions", RL),
    **same("beta", RL, advice="this trainer's beta is another thing: trl_args: beta"),
    **becomes("epsilon_high", RL, epsilon_high=_epsilon_high),
    **becomes(
        "loss_type",
        GRPO_ONLY,
        loss_type=lambda run: TRL_LOSSES[run["loss_type"]],
        advice="the trainer's own losses are in trl_args: loss_type",
    ),
    **becomes("importance_sampling_level", GRPO_ONLY, importance_sampling_level=_ratio_level),
    **becomes(
        "advantage_type",
        GRPO_ONLY,
        multi_objective_aggregation=lambda run: AGGREGATION[run["advantage_type"]],
        advice="TRL's GRPO has group and gdpo; rloo is algorithm: rloo",
    ),
    **same("scale_rewards", GRPO_ONLY, advice="rloo has trl_args: normalize_advantages"),
    **same("delta sapo_temperature_pos sapo_temperature_neg top_entropy_quantile entropy_coef", GRPO_ONLY),
    **same("vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg use_bias_correction_kl", GRPO_ONLY),
    **nothing("normalize_advantages", "TRL's rloo has trl_args: normalize_advantages"),
    **nothing("kl_in", "TRL's grpo has it in the loss, its rloo in the reward"),
    **nothing("kl_estimator", "TRL's grpo takes k3, its rloo k1"),
    **nothing("discount", "TRL has no step rewards"),
    **nothing("zero_variance_groups max_resamples", "TRL trains on every group"),
    **nothing(
        "importance_sampling", "TRL corrects only for vLLM's sampling (trl_args: vllm_importance_…)", also=("none",)
    ),
    **nothing("importance_sampling_cap importance_sampling_floor", "TRL corrects only for vLLM's sampling"),
    **nothing("max_logprob_gap", "TRL samples with the trainer's own weights and logprobs"),
}

SAMPLING: Meanings = {
    **same("temperature top_p top_k", ONLINE),
    **becomes("min_p", ONLINE, min_p=lambda run: run["min_p"] or None),
    **becomes(
        "max_completion_length",
        ONLINE,
        max_completion_length=lambda run: run["max_completion_length"],
        max_new_tokens=lambda run: run.token_limit,
    ),
    **becomes("max_tokens", ONLINE, generation_kwargs=_generation_kwargs),
    **nothing("stop", "TRL cannot end a completion at a string"),
    **nothing("max_decode_rows", "TRL decodes a whole batch at once"),
    **nothing("prefix_cache_gb", "TRL keeps nothing between two calls of generate"),
    **nothing("decode_step", "TRL decodes with model.generate"),
}

WORKERS: Meanings = {  # the trainer samples from the very module it trains
    **nothing("engine", "TRL generates with transformers (trl_args: use_vllm for vLLM)"),
    **nothing("num_rollout_workers", "the trainer generates by itself", also=(1,)),
    **nothing("num_reward_workers", "the trainer calls the reward functions itself", also=(1,)),
    **nothing("rollout_gpu", "the trainer generates by itself, on actor_gpu"),
    **nothing("weight_sync_method", "the trainer samples from its own weights", also=("direct",)),
    **nothing(
        "sync_weights_every weight_sync_dir delta_over delta_full_every sync_timeout",
        "the trainer samples from its own weights",
    ),
    **nothing(ServingConfig.model_fields, "TRL has options of its own for vLLM: trl_args: vllm_…"),
    **nothing(
        [name for name in RolloutConfig.model_fields if name != "rollout_func"],
        "TRL's trainers make their rollouts by themselves",
    ),
    **by_mrl("rollout_func", GRPO_ONLY, advice="of TRL's trainers only GRPO takes one"),
    **nothing(OverlapConfig.model_fields, "TRL's trainers generate and train in turn"),
}

MEANINGS: Meanings = {**THE_RUN, **MODEL_AND_DATA, **REWARDS, **OPTIMIZER, **LOSS, **SAMPLING, **WORKERS}

RESERVED = {
    **dict.fromkeys(("output_dir", "logging_dir", "hub_model_id", "push_to_hub", "run_name"), "run_dir"),
    **dict.fromkeys(("remove_unused_columns", "log_completions_hub_repo", "num_completions_to_print"), "run_dir"),
    **dict.fromkeys(("logging_steps", "logging_strategy", "logging_first_step", "logging_nan_inf_filter"), "report_to"),
    **dict.fromkeys(("disable_tqdm", "project"), "report_to"),
    **dict.fromkeys(("model_init_kwargs", "quantization_config"), "model, dtype, revision"),
    **dict.fromkeys(("do_train", "do_eval", "do_predict", "per_gpu_eval_batch_size"), "eval_split"),
    **dict.fromkeys(("resume_from_checkpoint", "save_only_model", "restore_callback_states_from_checkpoint"), "resume"),
    "warmup_ratio": "warmup_steps",
}
"""Further options of TRL's that record and checkpoints depend on, and what says it in mrl."""


def fixed(run: TrainerRun) -> dict[str, Any]:
    """TRL's options that are the same in every run: each update is logged once, for `Recorder`, and nowhere else."""
    return {
        "output_dir": run.facts.output_dir,
        "logging_strategy": "steps",
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "disable_tqdm": True,
    }
