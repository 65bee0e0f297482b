"""What TRL's options are in mrl: the same, said otherwise, noted as having no part here, or refused. None is ignored.

Each function below reads the options of its subject and gives mrl's; what nobody reads and was changed is refused.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from mrl.config.hints import named_elsewhere
from mrl.errors import ConfigError
from mrl.trl.config import defaults, given

SAME = (
    *("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "max_grad_norm", "seed"),
    *("num_generations", "num_iterations", "max_completion_length", "temperature", "mask_truncated_completions"),
    *("top_entropy_quantile", "entropy_coef", "beta", "trust_remote_code", "save_total_limit"),
    *("gradient_checkpointing", "torch_compile", "use_liger_kernel"),
)
"""Options of the same name and meaning."""
_OF_LOSSES = (
    *("delta", "sapo_temperature_pos", "sapo_temperature_neg"),
    *("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
)
"""The same, for some losses only: mrl refuses them with another one, so they are given where they were changed."""
_NOTED = {
    "logging_steps logging_strategy logging_first_step logging_nan_inf_filter log_unique_prompts log_multimodal": (
        "every step is recorded, with its completions"
    ),
    "log_level log_level_replica log_on_each_node": "mrl says what it does on the console (report_to)",
    "dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor "
    "dataloader_in_order dataloader_drop_last dataloader_multiprocessing_context": "tasks are in memory",
    "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout "
    "local_rank average_tokens_across_devices": "mrl divides an actor's work over its GPUs itself (actor_parallelism)",
    "ds3_gather_for_generation vllm_server_timeout vllm_group_port vllm_model_impl": (
        "mrl has its own way to bring weights to the sampler (weight_sync_method)"
    ),
    "pad_to_multiple_of torch_empty_cache_steps gradient_checkpointing_kwargs use_cache per_device_eval_batch_size "
    "cache_implementation use_transformers_continuous_batching transformers_continuous_batching_config "
    "use_transformers_paged eval_accumulation_steps": "mrl cuts batches by tokens and by the memory that is free",
    "eval_on_start": "held-out tasks are always attempted before the first step",
    "accelerator_config skip_memory_metrics include_num_input_tokens_seen": "mrl measures by itself (docs/metrics.md)",
    "save_only_model hub_model_id hub_strategy hub_token hub_private_repo hub_revision hub_always_push": (
        "nothing is pushed while it trains; `mrl checkpoints RUN push USER/NAME` does it"
    ),
    "do_train do_eval": "train() trains, and evaluates where eval_strategy says so",
    "trackio_bucket_id trackio_static_space_id": "trackio's own environment variables say it",
}
"""Options without a part here that change nothing of what is learned, and what holds instead."""
NOTED = {name: sentence for names, sentence in _NOTED.items() for name in names.split()}
_SCHEDULES = {"constant_with_warmup": "constant", "constant": "constant", "linear": "linear", "cosine": "cosine"}
_AGGREGATION = {"sum_then_normalize": "group", "normalize_then_sum": "gdpo"}
_CORRECTIONS = {
    "token_truncate": "truncated",
    "token_mask": "masked",
    "sequence_truncate": "sequence_truncated",
    "sequence_mask": "sequence_masked",
}
_ADAM = ("adamw_torch", "adamw_torch_fused", "adamw_hf")
_HERE = ("0.0.0.0", "127.0.0.1", "localhost")


class Given:
    """TRL's options, of which it is noted which were read. multi_turn, rollout_func: as for `mrl_options`."""

    def __init__(self, args: Any, *, multi_turn: bool, rollout_func: bool) -> None:
        self.values = given(args)
        self.multi_turn, self.rollout_func = multi_turn, rollout_func
        self.read: set[str] = set()
        self.notes: list[str] = []

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        value = self.values[name]
        return getattr(value, "value", value)  # transformers has enums of texts

    def changed(self, name: str) -> bool:
        """Whether it is not the default."""
        return bool(self.values[name] != defaults()[name])

    def note(self, name: str, sentence: str) -> None:
        self.notes.append(f"{name}={self.values[name]!r}: {sentence}")

    def refuse_the_rest(self) -> None:
        """What nobody has read has no meaning here."""
        for name in self.values:
            if name in self.read or not self.changed(name):
                continue
            if name not in NOTED:
                instead = named_elsewhere(name) or "mrl has nothing of the kind, leave it out"
                raise ConfigError(f"args: {name}={self.values[name]!r} is not taken over; {instead}")
            self.note(name, NOTED[name])


def mrl_options(args: Any, *, multi_turn: bool = False, rollout_func: bool = False) -> tuple[dict[str, Any], list[str]]:
    """mrl's options by flat name, and what the user should know of the others. args: a GRPOConfig, this one's or TRL's.

    multi_turn: whether there are tools or environments; rollout_func: whether a function makes the rollouts. Raises
    ConfigError for what has no meaning here.
    """
    options = Given(args, multi_turn=multi_turn, rollout_func=rollout_func)
    made: dict[str, Any] = {name: options[name] for name in SAME}
    for part in (_sizes, _lengths, _sampling, _loss, _schedule, _turns, _engine, _model, _saving, _evaluation, _record):
        made |= part(options)
    options.read |= {"output_dir", "reward_weights"}  # GRPOTrainer's
    options.refuse_the_rest()
    return made, options.notes


def _sizes(args: Given) -> dict[str, Any]:
    """A step is one update on whole groups. TRL counts completions, and generates for an update in several goes if it
    is told to; then so many attempts run at a time."""
    if (processes := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        raise ConfigError(f"args: started as {processes} processes; mrl starts its own: run the script with python")
    each, parts, group = (
        args["per_device_train_batch_size"],
        args["gradient_accumulation_steps"],
        args["num_generations"],
    )
    update, batch, rounds = each * parts, args["generation_batch_size"], args["steps_per_generation"]
    if batch is not None and rounds is not None:
        raise ConfigError("args: generation_batch_size and steps_per_generation say the same: give only one")
    at_once = batch or each * (rounds or parts)
    if at_once % group:
        raise ConfigError(
            f"args: {at_once} completions are generated at a time (per_device_train_batch_size x "
            f"{'steps_per_generation' if rounds else 'gradient_accumulation_steps'}), which are no whole groups of "
            f"num_generations={group}"
        )
    if update % at_once:
        raise ConfigError(
            f"args: {at_once} completions are generated at a time and an update is on {update}; in mrl an update is on "
            f"all that was generated: use gradient_accumulation_steps={max(1, at_once // each)}"
        )
    epochs, steps = args["num_train_epochs"], args["max_steps"]
    if epochs != int(epochs) or epochs < 1:
        raise ConfigError(f"args: num_train_epochs={epochs}: mrl counts whole ones; say max_steps for a part")
    made = {"batch_size": update // group, "num_epochs": int(epochs), "shuffle": bool(args["shuffle_dataset"])}
    if steps > 0:
        made["max_steps"] = -(-steps // args["num_iterations"])  # TRL's are updates
    if at_once < update and args.rollout_func:
        name = "generation_batch_size" if rounds is None else "steps_per_generation"
        args.note(name, f"the rollout_func is asked once for all {update} completions of an update")
    elif at_once < update:
        made["max_concurrent_rollouts"] = at_once
    return made


def _lengths(args: Given) -> dict[str, Any]:
    if args["max_completion_length"] is None:
        raise ConfigError("args: max_completion_length=None: mrl needs a number, e.g. 1024")
    return {"max_model_len": args["vllm_max_model_length"] or max(16384, 2 * args["max_completion_length"])}


def _sampling(args: Given) -> dict[str, Any]:
    made = {name: args[name] for name in ("top_p", "top_k", "min_p") if args[name] is not None}
    return made | {"chat_template_kwargs": _dict(args, "chat_template_kwargs")}


def _loss(args: Given) -> dict[str, Any]:
    loss, level = args["loss_type"], args["importance_sampling_level"]
    made: dict[str, Any] = {"loss_type": loss, "advantage_type": _AGGREGATION[args["multi_objective_aggregation"]]}
    made |= {name: args[name] for name in _OF_LOSSES if args.changed(name)}
    if loss == "cispo":  # whose bound is the ratio itself
        made["epsilon_high"] = args["epsilon_high"] or args["epsilon"]
    else:
        made |= {name: args[name] for name in ("epsilon", "epsilon_high") if args.changed(name)}
        args.read |= {"epsilon", "epsilon_high"}
    args.read |= set(_OF_LOSSES)
    if level != "token":
        made["importance_sampling_level"] = level
    if made["advantage_type"] == "group":
        scale = args["scale_rewards"]
        made["scale_rewards"] = {True: "group", False: "none"}.get(scale, scale)
    if not args["use_bias_correction_kl"] and args["beta"]:
        made["use_bias_correction_kl"] = False
    return made


def _schedule(args: Given) -> dict[str, Any]:
    schedule, warmup = args["lr_scheduler_type"], args["warmup_steps"]
    if schedule not in _SCHEDULES:
        raise ConfigError(f"args: lr_scheduler_type={schedule!r}: mrl has {', '.join(_SCHEDULES)}")
    if warmup != int(warmup):
        raise ConfigError(f"args: warmup_steps={warmup}: mrl counts steps; give a whole number")
    if args["optim"] not in _ADAM:
        raise ConfigError(f"args: optim={args['optim']!r}: the optimizer is AdamW, adamw_torch")
    return {"lr_scheduler_type": _SCHEDULES[schedule], "warmup_steps": int(warmup)}


def _turns(args: Given) -> dict[str, Any]:
    rounds = args["max_tool_calling_iterations"]
    if rounds is None:
        return {}
    if not args.multi_turn:
        args.note("max_tool_calling_iterations", "there are neither tools nor environments")
        return {}
    return {"max_turns": rounds + 1}  # TRL counts rounds of calls, and there is an answer to the last


def _engine(args: Given) -> dict[str, Any]:
    """Where completions are sampled, and how the difference to the trainer is corrected."""
    names = ("mode", "server_base_url", "server_host", "server_port", "enable_sleep_mode", "gpu_memory_utilization")
    values = {name: args[f"vllm_{name}"] for name in (*names, "tensor_parallel_size")}
    correction = _correction(args)
    if not args["use_vllm"]:
        return {"importance_sampling": "none"}
    if values["mode"] == "server":
        host = "127.0.0.1" if values["server_host"] == "0.0.0.0" else values["server_host"]
        url = values["server_base_url"] or f"http://{host}:{values['server_port']}"
        if args.rollout_func and urlsplit(url).hostname in _HERE:
            args.note("vllm_mode", f"the run itself is the server that answers the function, at {url} (serve)")
            correction |= {"serve": f"127.0.0.1:{urlsplit(url).port or 80}"}
        else:
            args.note(
                "vllm_mode", f"mrl samples on the server at {url}, started as docs/vllm.md says (engine: vllm-remote)"
            )
            return correction | {"engine": "vllm-remote", "vllm_urls": [url]}
    if find_spec("vllm") is None:
        args.note("use_vllm", "vLLM is not installed here, so mrl samples with its own engine (engine: transformers)")
        return correction
    args.note("vllm_mode", "vLLM runs in a process of its own on the actor's GPU (engine: vllm)")
    made = correction | {"engine": "vllm", "tensor_parallel_size": values["tensor_parallel_size"]}
    if values["enable_sleep_mode"]:
        return made | {"colocate": True}
    return made | {"gpu_memory_utilization": values["gpu_memory_utilization"]}


def _correction(args: Given) -> dict[str, Any]:
    cap, floor = args["vllm_importance_sampling_clip_max"], args["vllm_importance_sampling_clip_min"]
    cap = cap if args["vllm_importance_sampling_cap"] is None else args["vllm_importance_sampling_cap"]
    mode = args["vllm_importance_sampling_mode"]
    if not args["vllm_importance_sampling_correction"]:
        return {"importance_sampling": "none"}
    if args["loss_type"] == "vespo":  # which weighs sequences itself
        mode = mode.replace("sequence", "token")
    made = {"importance_sampling": _CORRECTIONS[mode], "importance_sampling_cap": cap}
    return made | ({} if floor is None else {"importance_sampling_floor": floor})


def _model(args: Given) -> dict[str, Any]:
    """Precision, device, and how the model is loaded."""
    if args["fp16"]:
        raise ConfigError("args: fp16=True: mrl computes in bfloat16 or float32; leave it out")
    made: dict[str, Any] = {} if args["bf16"] is None else {"dtype": "bfloat16" if args["bf16"] else "float32"}
    if args["use_cpu"]:
        made |= {"device": "cpu"} | ({"dtype": "auto"} if args["bf16"] else {})
    for name, value in _dict(args, "model_init_kwargs").items():
        if name == "revision":
            made["revision"] = value
        elif name == "trust_remote_code":
            made["trust_remote_code"] = value
        elif name in ("attn_implementation", "device_map", "use_cache", "low_cpu_mem_usage"):
            args.note("model_init_kwargs", f"{name} is chosen by mrl")
        elif name in ("dtype", "torch_dtype"):
            args.note("model_init_kwargs", f"{name}: master weights are float32, and mrl's dtype says how it computes")
        else:
            raise ConfigError(f"args: model_init_kwargs: {name} is not taken over; leave it out")
    return made


def _saving(args: Given) -> dict[str, Any]:
    strategy, steps = args["save_strategy"], args["save_steps"]
    if strategy not in ("steps", "no"):
        raise ConfigError(f"args: save_strategy={strategy!r}: mrl saves every save_steps, and at the end: use 'steps'")
    if steps != int(steps):
        raise ConfigError(f"args: save_steps={steps}: mrl counts steps; give a whole number")
    return {"save_steps": int(steps) if strategy == "steps" else 0}


def _evaluation(args: Given) -> dict[str, Any]:
    strategy, steps = args["eval_strategy"], args["eval_steps"]
    if strategy == "no":
        return {}
    if strategy != "steps":
        raise ConfigError(f"args: eval_strategy={strategy!r}: mrl evaluates every eval_steps: use 'steps'")
    return {"eval_steps": int(steps or args["logging_steps"]), "eval_samples": None}


def _record(args: Given) -> dict[str, Any]:
    """Who is told of the run. Trackers have settings of their own, by environment variables."""
    named = args["report_to"]
    trackers = [named] if isinstance(named, str) else list(named or [])
    if "all" in trackers:
        raise ConfigError("args: report_to='all': name the trackers, e.g. 'trackio'")
    trackers = [name for name in trackers if name != "none"]
    made: dict[str, Any] = {"report_to": [*([] if args["disable_tqdm"] else ["console"]), *trackers]}
    for tracker, option, variable in (
        ("trackio", "project", "TRACKIO_PROJECT"),
        ("trackio", "trackio_space_id", "TRACKIO_SPACE_ID"),
        ("wandb", "project", "WANDB_PROJECT"),
        ("wandb", "run_name", "WANDB_NAME"),
    ):
        value = args[option]
        if tracker in trackers and value is not None and args.changed(option):
            os.environ.setdefault(variable, str(value))
    if args["push_to_hub"]:
        raise ConfigError("args: push_to_hub=True: `mrl checkpoints RUN push USER/NAME` does it when the run is over")
    if args["log_completions"]:
        every = args["per_device_train_batch_size"] * args["gradient_accumulation_steps"]
        made["log_completions"] = args["num_completions_to_print"] or every
    if args["run_name"] is not None and args["output_dir"] is None:
        made["run_name"] = args["run_name"]
    elif args["run_name"] is not None and "wandb" not in trackers:
        args.note("run_name", "the run is called by its folder, output_dir")
    if args.changed("project") and not {"trackio", "wandb"} & set(trackers):
        args.note("project", "no tracker is told of it (report_to)")
    if args["trackio_space_id"] is not None and "trackio" not in trackers:
        args.note("trackio_space_id", "trackio is not told of the run (report_to)")
    if not args["log_completions"] and args.changed("num_completions_to_print"):
        args.note("num_completions_to_print", "none are printed without log_completions")
    return made


def _dict(args: Given, name: str) -> dict[str, Any]:
    value = args[name]
    if isinstance(value, str):  # as TRL's command line has them
        import yaml

        value = yaml.safe_load(value)
    return dict(value or {})
