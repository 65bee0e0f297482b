"""The options as keywords, for editors and type checkers. Made by scripts/build_keywords.py: do not edit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from mrl.config import (
        AlgorithmConfig,
        DataConfig,
        GenerationConfig,
        ModelConfig,
        OverlapConfig,
        RewardConfig,
        RolloutConfig,
        RunConfig,
        RuntimeConfig,
        ServingConfig,
        SimpleConfig,
        TrainingConfig,
    )


class Options(TypedDict, total=False):
    """Every option of `OrchestratorConfig` by its flat name, its sections, and what only Python can give."""

    # model
    model: str | ModelConfig | dict[str, Any] | PreTrainedModel
    revision: str | None
    trust_remote_code: bool
    dtype: Literal["auto", "float32", "bfloat16"]
    device: str
    max_model_len: int
    max_decode_rows: int | None
    prefix_cache_gb: float | None
    decode_step: Literal["auto", "eager", "static"]
    use_lora: bool
    lora_r: int
    lora_alpha: int
    lora_dropout: float
    lora_target_modules: list[str] | None
    tokenizer: PreTrainedTokenizerBase
    # data
    train_dataset: Any
    dataset_name: str | None
    dataset_config: str | None
    dataset_split: str
    eval_dataset: Any
    eval_split: str | None
    eval_samples: int | None
    prompt_column: str | None
    rename: dict[str, str]
    max_samples: int | None
    shuffle: bool
    prompt_format: Literal["auto", "chat", "text"]
    system_prompt: str | None
    chat_template_kwargs: dict[str, Any]
    # training
    learning_rate: float
    lr_scheduler_type: Literal["constant", "linear", "cosine"]
    warmup_steps: int
    weight_decay: float
    adam_beta1: float
    adam_beta2: float
    max_grad_norm: float
    max_steps: int
    num_epochs: int
    batch_size: int
    num_generations: int
    num_iterations: int
    gradient_accumulation_steps: int
    max_tokens_per_micro_batch: int | None
    packing: bool
    gradient_checkpointing: bool
    torch_compile: bool
    use_liger_kernel: bool
    offload_optimizer: bool
    actor_parallelism: Literal["fsdp", "ddp"]
    ddp_timeout: float
    save_steps: int
    save_total_limit: int | None
    best_metric: str | None
    checkpoint_errors: Literal["continue", "stop"]
    eval_steps: int
    max_failed_fraction: float
    seed: int
    # algorithm
    loss_type: str
    epsilon: float
    epsilon_high: float | None
    delta: float | None
    importance_sampling_level: Literal["token", "sequence"] | None
    sapo_temperature_pos: float
    sapo_temperature_neg: float
    vespo_k_pos: float
    vespo_lambda_pos: float
    vespo_k_neg: float
    vespo_lambda_neg: float
    advantage_type: str
    scale_rewards: Literal["group", "batch", "none"]
    normalize_advantages: bool
    discount: float
    zero_variance_groups: Literal["keep", "drop", "resample"]
    max_resamples: int
    soft_punish_cache: int
    overlong_penalty: float
    length_penalty: float
    beta: float
    kl_in: Literal["loss", "reward"]
    kl_estimator: Literal["k1", "k2", "k3"] | None
    use_bias_correction_kl: bool
    entropy_coef: float
    top_entropy_quantile: float
    importance_sampling: Literal["none", "truncated", "masked", "sequence_truncated", "sequence_masked"]
    importance_sampling_cap: float | None
    importance_sampling_floor: float | None
    max_logprob_gap: float | None
    mask_truncated_completions: bool
    max_completion_length: int
    # generation
    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    stop: list[str]
    # rollout
    rollout_source: str
    rollout_options: dict[str, Any]
    tools: Any
    environment_factory: Any
    rollout_func: Any
    serve: str | None
    serve_token_env: str
    max_turns: int | None
    max_rollout_tokens: int | None
    step_timeout: float | None
    rollout_timeout: float | None
    max_concurrent_rollouts: int | None
    # reward
    reward_funcs: Any
    reward_processing_classes: Any
    reward_weights: list[float] | None
    reward_timeout: float
    reward_trial: bool
    sandbox: str
    sandbox_options: dict[str, Any]
    sandbox_timeout: float
    sandbox_memory_mb: int
    # runtime
    backend: str
    backend_options: dict[str, Any]
    engine: str
    num_rollout_workers: int
    num_reward_workers: int
    actor_gpu: str | None
    rollout_gpu: str | None
    weight_sync_method: str
    weight_sync_dir: str | None
    delta_over: Literal["reload", "volume", "direct"]
    delta_full_every: int
    sync_weights_every: int
    sync_timeout: float
    max_worker_restarts: int
    call_timeout: float
    max_cost: float | None
    # serving
    vllm_python: str | None
    tensor_parallel_size: int
    vllm_devices: list[int]
    gpu_memory_utilization: float | None
    colocate: bool
    vllm_kv_cache_gb: float | None
    vllm_enforce_eager: bool | None
    vllm_max_num_seqs: int
    vllm_args: dict[str, Any]
    vllm_start_timeout: float
    vllm_stall_timeout: float
    vllm_urls: list[str]
    vllm_api_key_env: str | None
    vllm_model_name: str | None
    lora_sync: Literal["adapter", "merged"]
    repeatable_sampling: bool | None
    # overlap
    async_mode: Literal["off", "pipeline", "queue"]
    max_staleness: int
    stale_rollouts: Literal["drop", "correct"]
    in_flight_updates: bool
    over_sampling: float
    # run
    run_dir: str | None
    run_name: str | None
    report_to: list[str]
    log_completions: int
    resume: str | None
    allow_change: list[str]
    # trl
    mode: Literal["orchestrated", "simple"]
    algorithm: str | AlgorithmConfig | dict[str, Any]
    trl_args: dict[str, Any]
    # whole sections
    data: DataConfig | dict[str, Any]
    training: TrainingConfig | dict[str, Any]
    generation: GenerationConfig | dict[str, Any]
    rollout: RolloutConfig | dict[str, Any]
    reward: RewardConfig | dict[str, Any]
    runtime: RuntimeConfig | dict[str, Any]
    serving: ServingConfig | dict[str, Any]
    overlap: OverlapConfig | dict[str, Any]
    run: RunConfig | dict[str, Any]
    trl: SimpleConfig | dict[str, Any]
