"""What every option means in simple mode: the same, nothing and then only its default, or a refusal."""

from __future__ import annotations

import re
from typing import Any

import pytest

from mrl.config import OrchestratorConfig, flat_fields
from mrl.errors import ConfigError
from mrl.simple.option_rows import TrainerFacts
from mrl.simple.option_table import MEANINGS
from mrl.simple.options import check_options, owned_by, trl_options
from mrl.simple.trainers import ALL, TRAINERS

FACTS = TrainerFacts(output_dir="/nowhere", bf16=False, use_cpu=True, context=512, evaluates=False)

OTHER: dict[str, Any] = {
    # A value that is not the default, for every option; with what else has to be set for it to be valid.
    "mode": ("simple", {}),
    "algorithm": ("rloo", {}),
    "trl_args": ({"optim": "sgd"}, {}),
    "model": ("other", {}),
    "revision": ("main", {}),
    "trust_remote_code": (True, {}),
    "dtype": ("float32", {}),
    "device": ("cpu", {}),
    "max_model_len": (99, {}),
    "use_lora": (True, {}),
    "lora_r": (4, {"use_lora": True}),
    "lora_alpha": (4, {"use_lora": True}),
    "lora_dropout": (0.5, {"use_lora": True}),
    "lora_target_modules": (["q_proj"], {"use_lora": True}),
    "train_dataset": ([{"prompt": "x"}], {}),
    "dataset_name": ("x.jsonl", {}),
    "dataset_config": ("main", {}),
    "dataset_split": ("test", {}),
    "eval_dataset": ("y.jsonl", {}),
    "eval_split": ("test", {}),
    "eval_samples": (3, {}),
    "prompt_column": ("q", {}),
    "rename": ({"a": "b"}, {}),
    "max_samples": (3, {}),
    "shuffle": (False, {}),
    "prompt_format": ("text", {}),
    "system_prompt": ("be brief", {}),
    "chat_template_kwargs": ({"enable_thinking": False}, {}),
    "learning_rate": (0.1, {}),
    "lr_scheduler_type": ("cosine", {}),
    "warmup_steps": (3, {}),
    "weight_decay": (0.1, {}),
    "adam_beta1": (0.8, {}),
    "adam_beta2": (0.8, {}),
    "max_grad_norm": (0.5, {}),
    "max_steps": (7, {}),
    "num_epochs": (2, {}),
    "batch_size": (16, {}),
    "num_generations": (8, {}),
    "num_iterations": (2, {}),
    "gradient_accumulation_steps": (2, {}),
    "gradient_checkpointing": (True, {}),
    "loss_type": ("grpo", {}),
    "epsilon": (0.1, {}),
    "epsilon_high": (0.28, {}),
    "sapo_temperature_pos": (2.0, {"loss_type": "sapo"}),
    "sapo_temperature_neg": (2.0, {"loss_type": "sapo"}),
    "delta": (4.0, {}),
    "importance_sampling_level": ("sequence", {}),
    "vespo_k_pos": (1.0, {"loss_type": "vespo"}),
    "vespo_lambda_pos": (1.0, {"loss_type": "vespo"}),
    "vespo_k_neg": (1.0, {"loss_type": "vespo"}),
    "vespo_lambda_neg": (1.0, {"loss_type": "vespo"}),
    "advantage_type": ("gdpo", {}),
    "normalize_advantages": (True, {"advantage_type": "rloo"}),
    "discount": (0.9, {"advantage_type": "turn"}),
    "zero_variance_groups": ("drop", {}),
    "max_resamples": (5, {"zero_variance_groups": "resample"}),
    "soft_punish_cache": (8, {}),
    "overlong_penalty": (0.5, {"soft_punish_cache": 8}),
    "length_penalty": (0.1, {}),
    "kl_in": ("reward", {"beta": 0.1}),
    "kl_estimator": ("k2", {"beta": 0.1}),
    "use_bias_correction_kl": (False, {"beta": 0.1}),
    "entropy_coef": (0.01, {}),
    "top_entropy_quantile": (0.2, {}),
    "importance_sampling_floor": (0.5, {}),
    "max_logprob_gap": (0.5, {}),
    "max_decode_rows": (8, {}),
    "prefix_cache_gb": (1.0, {}),
    "decode_step": ("static", {}),
    "max_tokens_per_micro_batch": (512, {}),
    "packing": (False, {}),
    "torch_compile": (True, {}),
    "use_liger_kernel": (True, {}),
    "actor_parallelism": ("ddp", {}),
    "ddp_timeout": (60.0, {}),
    "offload_optimizer": (True, {}),
    "scale_rewards": ("batch", {}),
    "beta": (0.04, {}),
    "importance_sampling": ("masked", {}),
    "importance_sampling_cap": (3.0, {}),
    "mask_truncated_completions": (True, {}),
    "max_completion_length": (64, {}),
    "save_steps": (5, {}),
    "save_total_limit": (2, {}),
    "best_metric": ("reward/mean", {}),
    "checkpoint_errors": ("stop", {}),
    "eval_steps": (2, {}),
    "max_failed_fraction": (0.1, {}),
    "seed": (7, {}),
    "max_tokens": (32, {}),
    "temperature": (0.9, {}),
    "top_p": (0.8, {}),
    "top_k": (5, {}),
    "min_p": (0.1, {}),
    "stop": (["\n"], {}),
    "rollout_source": ("my_game", {}),
    "rollout_options": ({"turns": 3}, {}),
    "tools": (["my_tools.py:search"], {}),
    "environment_factory": ("my_games.py:Chess", {}),
    "rollout_func": ("my_rollouts.py:play", {}),
    "evaluation_test": ("my_eval.py", {}),
    "serve": ("127.0.0.1:9000", {}),
    "serve_token_env": ("MY_TOKEN", {}),
    "max_turns": (3, {"rollout_source": "my_game"}),
    "max_rollout_tokens": (64, {"rollout_source": "my_game"}),
    "step_timeout": (5.0, {"rollout_source": "my_game"}),
    "rollout_timeout": (5.0, {}),
    "max_concurrent_rollouts": (8, {}),
    "reward_funcs": ("sandbox_partial", {}),
    "reward_weights": ([1.0], {}),
    "reward_timeout": (5.0, {}),
    "reward_trial": (False, {}),
    "reward_processing_classes": ([None], {}),
    "sandbox": ("process", {}),
    "sandbox_options": ({"slots": 2}, {}),
    "sandbox_timeout": (5.0, {}),
    "sandbox_memory_mb": (99, {}),
    "backend": ("ray", {}),
    "backend_options": ({"address": "auto"}, {}),
    "engine": ("vllm", {}),
    "num_rollout_workers": (3, {}),
    "num_reward_workers": (3, {}),
    "actor_gpu": ("H100", {}),
    "rollout_gpu": ("H100", {}),
    "weight_sync_method": ("volume", {}),
    "sync_weights_every": (2, {}),
    "weight_sync_dir": ("/tmp/weights", {}),
    "delta_over": ("volume", {"weight_sync_method": "delta"}),
    "delta_full_every": (5, {"weight_sync_method": "delta"}),
    "sync_timeout": (9.0, {}),
    "max_worker_restarts": (3, {}),
    "max_cost": (5.0, {}),
    "vllm_python": ("/env/bin/python", {}),
    "tensor_parallel_size": (2, {}),
    "vllm_devices": ([1], {}),
    "gpu_memory_utilization": (0.5, {}),
    "vllm_kv_cache_gb": (1.0, {}),
    "vllm_enforce_eager": (True, {}),
    "vllm_max_num_seqs": (8, {}),
    "vllm_args": ({"max_num_batched_tokens": 64}, {}),
    "vllm_start_timeout": (9.0, {}),
    "vllm_stall_timeout": (9.0, {}),
    "vllm_urls": (["http://x"], {}),
    "vllm_api_key_env": ("KEY", {}),
    "vllm_model_name": ("m", {}),
    "colocate": (True, {}),
    "lora_sync": ("merged", {}),
    "repeatable_sampling": (True, {}),
    "async_mode": ("pipeline", {}),
    "max_staleness": (2, {"async_mode": "queue"}),
    "stale_rollouts": ("correct", {"async_mode": "queue"}),
    "in_flight_updates": (False, {"async_mode": "queue"}),
    "over_sampling": (1.5, {}),
    "call_timeout": (9.0, {}),
    "run_dir": ("there", {}),
    "run_name": ("name", {}),
    "report_to": (["jsonl"], {}),
    "log_completions": (2, {}),
    "resume": ("a-run", {}),
    "allow_change": (["seed"], {"resume": "a-run"}),
}

EXPECTED: dict[str, dict[str, Any]] = {
    # What the value above becomes in TRL's GRPOConfig.
    "trust_remote_code": {"trust_remote_code": True},
    "chat_template_kwargs": {"chat_template_kwargs": {"enable_thinking": False}},
    "shuffle": {"shuffle_dataset": False},
    "learning_rate": {"learning_rate": 0.1},
    "lr_scheduler_type": {"lr_scheduler_type": "cosine"},
    "warmup_steps": {"warmup_steps": 3},
    "weight_decay": {"weight_decay": 0.1},
    "adam_beta1": {"adam_beta1": 0.8},
    "adam_beta2": {"adam_beta2": 0.8},
    "max_grad_norm": {"max_grad_norm": 0.5},
    "max_steps": {"max_steps": 7},
    "num_epochs": {"num_train_epochs": 2},
    "batch_size": {"per_device_train_batch_size": 64},
    "num_generations": {"num_generations": 8, "per_device_train_batch_size": 64},
    "num_iterations": {"num_iterations": 2},
    "gradient_accumulation_steps": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 16},
    "gradient_checkpointing": {"gradient_checkpointing": True},
    "loss_type": {"loss_type": "grpo"},
    "epsilon": {"epsilon": 0.1, "epsilon_high": None},
    "epsilon_high": {"epsilon_high": 0.28},
    "sapo_temperature_pos": {"sapo_temperature_pos": 2.0},
    "sapo_temperature_neg": {"sapo_temperature_neg": 2.0},
    "scale_rewards": {"scale_rewards": "batch"},
    "delta": {"delta": 4.0},
    "importance_sampling_level": {"importance_sampling_level": "sequence"},
    "vespo_k_pos": {"vespo_k_pos": 1.0},
    "vespo_lambda_pos": {"vespo_lambda_pos": 1.0},
    "vespo_k_neg": {"vespo_k_neg": 1.0},
    "vespo_lambda_neg": {"vespo_lambda_neg": 1.0},
    "advantage_type": {"multi_objective_aggregation": "normalize_then_sum"},
    "use_bias_correction_kl": {"use_bias_correction_kl": False},
    "entropy_coef": {"entropy_coef": 0.01},
    "top_entropy_quantile": {"top_entropy_quantile": 0.2},
    "torch_compile": {"torch_compile": True},
    "beta": {"beta": 0.04},
    "mask_truncated_completions": {"mask_truncated_completions": True},
    "max_completion_length": {"max_completion_length": 64},
    "seed": {"seed": 7, "data_seed": 7},
    "max_tokens": {"generation_kwargs": {"max_new_tokens": 32}, "max_completion_length": 1024},
    "temperature": {"temperature": 0.9},
    "top_p": {"top_p": 0.8},
    "top_k": {"top_k": 5},
    "min_p": {"min_p": 0.1},
}


def config(**options: Any) -> OrchestratorConfig:
    return OrchestratorConfig.from_flat(**({"mode": "simple", "algorithm": "grpo"} | options))


def changed(name: str, algorithm: str) -> OrchestratorConfig:
    value, needs = OTHER[name]
    return config(**({"algorithm": algorithm} | needs | {name: value}))


def test_every_option_has_a_meaning_and_is_tried_here() -> None:
    assert set(MEANINGS) == set(flat_fields()) == set(OTHER)


@pytest.mark.parametrize("name", sorted(set(flat_fields()) - {"mode", "algorithm"}))
def test_a_changed_option_means_something_or_is_refused(name: str) -> None:
    needs = OTHER[name][1]
    refused = re.compile(rf"^({'|'.join([name, *needs])}): .*simple", re.DOTALL)
    for algorithm in sorted(ALL):
        said = refusal(changed(name, algorithm), algorithm)
        if all(algorithm in MEANINGS[option].trainers for option in (name, *needs)):
            assert said is None, (algorithm, said)
        else:
            assert said is not None, f"{name} means nothing to {algorithm} and is not refused"
            assert refused.search(said), (algorithm, said)


def refusal(chosen: OrchestratorConfig, algorithm: str) -> str | None:
    try:
        check_options(chosen, TRAINERS.get(algorithm))
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_an_option_for_trl_reaches_its_config(name: str) -> None:
    grpo = TRAINERS.get("grpo")
    chosen = changed(name, "grpo")
    made = grpo.load("config")(**trl_options(chosen, grpo, FACTS))
    for key, value in EXPECTED[name].items():
        assert getattr(made, key) == value, key
    plain = grpo.load("config")(**trl_options(config(), grpo, FACTS))
    assert any(getattr(plain, key) != value for key, value in EXPECTED[name].items())


def test_every_option_written_to_trl_is_expected_above_or_the_machines() -> None:
    written = {name for name, meaning in MEANINGS.items() if meaning.trl and "grpo" in meaning.trainers}
    of_the_run = {"dtype", "device", "max_model_len", "report_to", "log_completions", "best_metric", "reward_weights"}
    assert written - set(EXPECTED) == of_the_run | {"save_steps", "save_total_limit", "eval_steps"}


@pytest.mark.parametrize("algorithm", sorted(ALL))
def test_the_defaults_make_a_config_of_every_trainer(algorithm: str) -> None:
    spec = TRAINERS.get(algorithm)
    chosen = config(algorithm=algorithm)
    check_options(chosen, spec)
    made = spec.load("config")(**trl_options(chosen, spec, FACTS))
    assert made.learning_rate == 5e-6
    assert made.report_to == []


def test_steps_of_mrl_are_updates_of_trl() -> None:
    grpo = TRAINERS.get("grpo")
    made = trl_options(config(num_iterations=3, max_steps=10, warmup_steps=2), grpo, FACTS)
    assert (made["max_steps"], made["warmup_steps"], made["num_iterations"]) == (30, 6, 3)


@pytest.mark.parametrize(
    ("loss", "options", "expected"),
    [
        ("gspo", {}, ("grpo", "sequence")),
        ("luspo", {}, ("luspo", "sequence")),
        ("grpo", {"importance_sampling_level": "sequence"}, ("grpo", "sequence")),
        ("vespo", {}, ("vespo", "token")),
    ],
)
def test_losses_keep_their_ratio(loss: str, options: dict[str, Any], expected: tuple[str, str]) -> None:
    made = trl_options(config(loss_type=loss, **options), TRAINERS.get("grpo"), FACTS)
    assert (made["loss_type"], made["importance_sampling_level"]) == expected


def test_cispo_keeps_its_default_cap() -> None:
    assert trl_options(config(loss_type="cispo"), TRAINERS.get("grpo"), FACTS)["epsilon_high"] == 5.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient_accumulation_steps": 3}, "gradient_accumulation_steps: .*32; use 2"),
        ({"loss_type": "bnpo", "gradient_accumulation_steps": 2}, "gradient_accumulation_steps: TRL's bnpo"),
        ({"max_tokens": 64, "max_completion_length": 32}, "max_tokens: .*use 32"),
        ({"importance_sampling": "truncated", "top_p": 0.9}, "importance_sampling: truncated"),
        ({"temperature": 0.0}, "temperature"),
        ({"device": "cuda:1"}, "CUDA_VISIBLE_DEVICES=1"),
        ({"algorithm": "sft", "num_generations": 8}, "num_generations"),
        ({"algorithm": "dpo", "beta": 0.3}, "trl_args: beta"),
        ({"loss_type": "reinforce"}, "loss_type: TRL has no 'reinforce'"),
        ({"advantage_type": "maxrl"}, "advantage_type: TRL's GRPO has no 'maxrl'"),
    ],
)
def test_combinations_that_trl_cannot_do_are_refused(options: dict[str, Any], message: str) -> None:
    chosen = config(**options)
    with pytest.raises(ConfigError, match=message):
        check_options(chosen, TRAINERS.get(chosen.trl.algorithm))


def test_what_the_trainer_does_anyway_may_be_said() -> None:
    says = {"num_rollout_workers": 1, "weight_sync_method": "direct", "importance_sampling": "none"}
    check_options(config(**says), TRAINERS.get("grpo"))
    check_options(config(importance_sampling="truncated", top_p=1.0), TRAINERS.get("grpo"))


@pytest.mark.parametrize(
    ("algorithm", "args", "message"),
    [
        ("sft", {"packin": True}, "SFTConfig has no option 'packin'; did you mean 'packing'"),
        ("sft", {"learning_rate": 1.0}, "learning_rate is set by mrl's own option learning_rate"),
        ("sft", {"per_device_train_batch_size": 2}, "mrl's own option batch_size"),
        ("dpo", {"output_dir": "x"}, "mrl's own option run_dir"),
        ("grpo", {"beta": 0.1}, "mrl's own option beta"),
        ("grpo", {"generation_batch_size": 8}, "mrl's own option batch_size"),
    ],
)
def test_trl_args_are_checked(algorithm: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trl_options(config(algorithm=algorithm, trl_args=args), TRAINERS.get(algorithm), FACTS)


def test_trl_args_are_passed_through() -> None:
    made = trl_options(
        config(algorithm="dpo", trl_args={"beta": 0.3, "loss_type": ["ipo"]}), TRAINERS.get("dpo"), FACTS
    )
    assert made["beta"] == 0.3
    assert made["loss_type"] == ["ipo"]
    assert owned_by("beta", TRAINERS.get("grpo")) == "beta"
    assert owned_by("beta", TRAINERS.get("dpo")) is None


@pytest.mark.parametrize("options", [{"algorithm": "dpo"}, {"trl_args": {"packing": True}}])
def test_options_of_simple_mode_are_refused_outside_it(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(options))} has an effect only with mode: simple"):
        OrchestratorConfig.from_flat(**options)


def test_an_unknown_trainer_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'dpo'"):
        TRAINERS.get("dpoo")
