"""What other trainers call things: an unknown option with a name of theirs is answered with its name here, or with what
does its work. TRL, veRL, prime-rl, OpenRLHF, and transformers, whose names many have taken over."""

from __future__ import annotations

_CALLED = {
    "model": "model_name_or_path model_name pretrain model_path",
    "dtype": "torch_dtype bf16 fp16 model_dtype",
    "max_model_len": "max_length seq_len max_seq_len max_seq_length vllm_max_model_length max_model_length",
    "lora_r": "lora_rank lora_dim",
    "dataset_name": "dataset train_files prompt_data dataset_path",
    "dataset_config": "dataset_config_name dataset_subset",
    "dataset_split": "split dataset_train_split",
    "eval_dataset": "val_files eval_data",
    "eval_split": "dataset_test_split",
    "max_samples": "max_train_samples train_max_samples",
    "prompt_column": "prompt_key input_key",
    "reward_funcs": "reward_fn reward_func reward_function reward_functions custom_reward_function remote_rm_url",
    "reward_weights": "reward_coefs",
    "batch_size": "per_device_train_batch_size train_batch_size rollout_batch_size generation_batch_size",
    "num_generations": "rollout.n n group_size rollouts_per_example n_samples_per_prompt num_rollouts",
    "num_iterations": "ppo_epochs mu num_ppo_epochs",
    "num_epochs": "num_train_epochs total_epochs epochs",
    "max_steps": "total_training_steps total_steps",
    "learning_rate": "lr actor_learning_rate",
    "lr_scheduler_type": "lr_scheduler scheduler",
    "warmup_steps": "lr_warmup_steps num_warmup_steps warmup_ratio lr_warmup_steps_ratio",
    "max_grad_norm": "grad_clip clip_grad max_norm",
    "max_tokens_per_micro_batch": "ppo_micro_batch_size ppo_micro_batch_size_per_gpu micro_batch_size "
    "ppo_max_token_len_per_gpu micro_train_batch_size",
    "packing": "use_remove_padding padding_free packing_samples",
    "use_liger_kernel": "use_liger use_liger_loss",
    "offload_optimizer": "optimizer_offload adam_offload",
    "ddp_timeout": "nccl_timeout",
    "beta": "kl_coef kl_loss_coef init_kl_coef kl_beta kl_coeff",
    "kl_estimator": "kl_loss_type kl_penalty",
    "epsilon": "clip_ratio clip_ratio_low cliprange clip_eps eps_clip epsilon_low",
    "epsilon_high": "clip_ratio_high eps_clip_high",
    "delta": "clip_ratio_c dual_clip",
    "entropy_coef": "entropy_coeff entropy_loss_coef",
    "loss_type": "loss_agg_mode loss",
    "advantage_type": "adv_estimator advantage_estimator",
    "scale_rewards": "norm_adv_by_std_in_grpo",
    "discount": "gamma",
    "environment_factory": "env environment env_factory",
    "rollout_func": "rollout_fn rollout_function generate_fn",
    "max_turns": "max_tool_calling_iterations max_steps_per_episode max_assistant_turns",
    "zero_variance_groups": "filter_groups dynamic_filtering online_difficulty_filtering dynamic_sampling",
    "soft_punish_cache": "overlong_buffer overlong_buffer_len",
    "importance_sampling": "vllm_importance_sampling_correction rollout_is vllm_importance_sampling_mode",
    "importance_sampling_cap": "vllm_importance_sampling_cap tis_imp_ratio_cap rollout_is_threshold",
    "max_completion_length": "max_response_length response_length generate_max_len max_completion_len",
    "max_tokens": "max_new_tokens",
    "min_p": "minp",
    "stop": "stop_strings stop_sequences",
    "num_rollout_workers": "num_workers vllm_num_engines rollout_workers",
    "vllm_urls": "vllm_server_base_url vllm_server_host vllm_server_port base_url",
    "gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "tensor_parallel_size": "vllm_tensor_parallel_size tensor_model_parallel_size tp",
    "vllm_enforce_eager": "enforce_eager",
    "vllm_max_num_seqs": "max_num_seqs",
    "vllm_args": "max_num_batched_tokens vllm_kwargs engine_kwargs enable_prefix_caching",
    "async_mode": "async_training async_generate",
    "max_staleness": "max_async_level max_off_policy_steps staleness_threshold async_level",
    "over_sampling": "oversampling_factor",
    "run_dir": "output_dir default_local_dir save_path ckpt_path",
    "run_name": "experiment_name wandb_name exp_name",
    "report_to": "logger use_wandb wandb loggers",
    "save_steps": "save_freq save_strategy save_interval",
    "eval_steps": "test_freq eval_strategy eval_interval eval_every",
    "best_metric": "metric_for_best_model load_best_model_at_end",
    "resume": "resume_from_checkpoint resume_mode load_checkpoint",
    "seed": "data_seed random_seed",
}

_INSTEAD = {
    "use_vllm": "use engine: vllm",
    "vllm_mode": "vLLM runs in a process of its own with engine: vllm, on the actor's GPU with colocate: true, or as "
    "servers with engine: vllm-remote",
    "inference": "engine: vllm or engine: vllm-remote says where rollouts are generated",
    "max_prompt_length prompt_max_len": "prompts are never cut, those that do not fit max_model_len are refused",
    "use_kl_loss": "a KL term is in the loss where beta is above 0",
    "use_kl_in_reward": "use kl_in: reward with beta above 0",
    "ref_model reference_model": "the reference is the policy before training, kept where beta is above 0",
    "sync_ref_model ref_model_sync_steps ref_model_mixup_alpha": "the reference stays the policy before training",
    "reward_model reward_model_path reward_pretrain": "a reward model is one of reward_funcs, by its Hub id or folder",
    "critic critic_model value_model lam vf_coef": "there is no critic, advantages come from the group: advantage_type",
    "rollout": "in it, n is num_generations here, and the rest are options of their own: temperature, top_p, engine …",
    "actor_rollout_ref actor trainer orchestrator": "options here are flat, e.g. num_generations, learning_rate, beta",
    "processing_class": "the tokenizer is the model's own; MRLTrainer takes both as objects: model, tokenizer",
    "args": "options are options of their own, e.g. learning_rate, batch_size; a GRPOConfig goes to "
    "mrl.trl's GRPOTrainer",
    "peft_config lora_config": "use use_lora: true, with lora_r, lora_alpha, lora_dropout and lora_target_modules",
    "load_in_4bit load_in_8bit quantization_config": "weights are not quantised; use_lora: true needs the least memory",
    "steps_per_generation ppo_mini_batch_size mini_batch_size": "a step is one update on all of its rollouts; "
    "num_iterations makes several",
    "per_device_eval_batch_size eval_batch_size": "held-out tasks are attempted as memory allows; eval_samples are "
    "their number",
    "optim optimizer": "the optimizer is AdamW: adam_beta1, adam_beta2, weight_decay",
    "logging_steps logging_strategy log_interval": "every step is logged; report_to says where",
    "push_to_hub hub_model_id": "`mrl checkpoints RUN push` does it",
    "deepspeed fsdp fsdp_config zero_stage strategy": "how an actor on several GPUs divides its work is "
    "actor_parallelism: fsdp or ddp",
    "nnodes n_gpus_per_node num_gpus": "the actor's GPUs are actor_gpu, e.g. A100:4",
    "attn_implementation flash_attn": "attention is chosen by the engine and by packing",
    "val_before_train eval_on_start eval_before_train": "held-out tasks are always attempted before the first step",
    "disable_dropout": "models train with the dropout of their own configuration; lora_dropout is the adapter's",
    "vllm_enable_sleep_mode free_cache_engine": "an engine keeps its memory, unless colocate: true lets it "
    "sleep while the actor trains",
}

_BY_NAME = {name: f"it is called '{here}' here" for here, names in _CALLED.items() for name in names.split()} | {
    name: sentence for names, sentence in _INSTEAD.items() for name in names.split()
}


def named_elsewhere(name: str) -> str | None:
    """What another trainer's option is here. name: also dotted, as `actor_rollout_ref.rollout.n`."""
    parts = name.split(".")
    tails = (".".join(parts[start:]) for start in range(len(parts)))
    return next((_BY_NAME[tail] for tail in tails if tail in _BY_NAME), None)
