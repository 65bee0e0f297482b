"""TRL's options in mrl: none is ignored."""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from mrl import MRLTrainer
from mrl.config import OrchestratorConfig
from mrl.errors import ConfigError
from mrl.trl import GRPOConfig, GRPOTrainer, RichProgressCallback
from mrl.trl.config import defaults
from mrl.trl.options import mrl_options

OTHER: dict[str, Any] = {
    # Another value than the default, where one more, its negation or a word will not do.
    "chat_template_kwargs": {"enable_thinking": False},
    "loss_type": "grpo",
    "importance_sampling_level": "sequence",
    "lr_scheduler_type": "cosine",
    "max_steps": 5,
    "model_init_kwargs": {"revision": "main"},
    "multi_objective_aggregation": "normalize_then_sum",
    "num_train_epochs": 2.0,
    "per_device_train_batch_size": 16,
    "generation_batch_size": 16,
    "gradient_accumulation_steps": 2,
    "num_generations": 4,
    "report_to": "trackio",
    "reward_weights": [2.0],
    "save_strategy": "no",
    "scale_rewards": False,
    "steps_per_generation": 1,
    "vllm_importance_sampling_mode": "token_mask",
    "vllm_mode": "server",
    "vllm_importance_sampling_cap": 2.0,
    "eval_strategy": "steps",
    "output_dir": "out",
    "epsilon": 0.1,
    "max_grad_norm": 0.5,
    "warmup_steps": 3,
}
BESIDE: dict[str, dict[str, Any]] = {
    # What has to be there for the option to mean anything.
    "steps_per_generation": {"gradient_accumulation_steps": 2},
    "eval_steps": {"eval_strategy": "steps", "eval_steps": 2},
    "use_bias_correction_kl": {"beta": 0.1},
    **{name: {"use_vllm": True, "vllm_mode": "server"} for name in defaults() if name.startswith("vllm_server_")},
    **{name: {"use_vllm": True} for name in defaults() if name.startswith("vllm_importance")},
    "vllm_mode": {"use_vllm": True},
    "num_completions_to_print": {"log_completions": True},
}
ELSEWHERE = {
    "output_dir": "GRPOTrainer's: the run's folder",
    "reward_weights": "GRPOTrainer's, which knows the functions",
    **dict.fromkeys(
        ("vllm_enable_sleep_mode", "vllm_gpu_memory_utilization", "vllm_tensor_parallel_size"),
        "read where vLLM is installed",
    ),
}


def another(name: str, value: Any) -> Any:
    if name in OTHER:
        return OTHER[name]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return 3 if name.endswith(("_steps", "_length", "iterations", "_max", "_min", "_cap", "_k")) else "x"


def outcome(**options: Any) -> Any:
    try:
        return mrl_options(GRPOConfig(**options), multi_turn=True)
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize("name", list(defaults()))
def test_every_option_does_something_is_noted_or_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("TRACKIO_PROJECT", "TRACKIO_SPACE_ID", "WANDB_PROJECT", "WANDB_NAME"):
        monkeypatch.setenv(variable, "kept as it was after the test")
    beside = BESIDE.get(name, {})
    changed = outcome(**beside | {name: another(name, defaults()[name])})
    assert changed != outcome(**{key: value for key, value in beside.items() if key != name}) or name in ELSEWHERE
    if isinstance(changed, str):
        assert changed.startswith("args: "), changed


@pytest.mark.slow
@pytest.mark.skipif(find_spec("trl") is None, reason="the peer whose names these are")
def test_names_and_defaults_are_trls(tmp_path: Path) -> None:
    import dataclasses

    import trl

    fields = {field.name: field for field in dataclasses.fields(trl.GRPOConfig) if field.init}
    assert set(fields) == set(defaults())
    for name, field in fields.items():
        if field.default is not dataclasses.MISSING:
            assert defaults()[name] == field.default, name
    given = {"num_generations": 4, "loss_type": "grpo", "chat_template_kwargs": {"a": 1}, "report_to": "none"}
    theirs = trl.GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, **given)
    mine = GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, **given)
    assert mrl_options(theirs, multi_turn=True) == mrl_options(mine, multi_turn=True)


def test_defaults_are_those_of_trl() -> None:
    made, notes = mrl_options(GRPOConfig(), multi_turn=False)
    expected = {
        "learning_rate": 1e-6,
        "lr_scheduler_type": "linear",
        "batch_size": 1,
        "num_generations": 8,
        "num_epochs": 3,
        "max_completion_length": 512,
        "loss_type": "dapo",
        "importance_sampling": "none",
        "save_steps": 500,
        "report_to": ["console"],
        "gradient_checkpointing": True,
    }
    assert {name: made[name] for name in expected} == expected
    assert notes == []
    OrchestratorConfig.from_flat(**made)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"gradient_accumulation_steps": 4}, {"batch_size": 4}),
        # carla.py: four servers, so four attempts at a time
        (
            {"per_device_train_batch_size": 4, "num_generations": 4, "steps_per_generation": 1}
            | {"gradient_accumulation_steps": 16},
            {"batch_size": 16, "max_concurrent_rollouts": 4},
        ),
        # browsergym_llm.py
        (
            {"per_device_train_batch_size": 1, "num_generations": 4, "generation_batch_size": 4}
            | {"gradient_accumulation_steps": 32},
            {"batch_size": 8, "max_concurrent_rollouts": 4},
        ),
        ({"num_iterations": 3, "max_steps": 10}, {"max_steps": 4, "num_iterations": 3}),
        ({"max_tool_calling_iterations": 10}, {"max_turns": 11}),
        ({"top_p": None, "top_k": 50, "temperature": 0.7}, {"top_k": 50, "temperature": 0.7}),
        ({"loss_type": "cispo"}, {"epsilon_high": 0.2}),
        ({"log_completions": True, "num_completions_to_print": 1}, {"log_completions": 1}),
        ({"log_completions": True}, {"log_completions": 8}),
        ({"max_completion_length": 16384}, {"max_model_len": 32768}),
        ({"save_strategy": "no"}, {"save_steps": 0}),
        ({"use_cpu": True, "bf16": True}, {"device": "cpu", "dtype": "auto"}),
        (
            {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": "http://gpu:8000"},
            {"engine": "vllm-remote", "vllm_urls": ["http://gpu:8000"], "importance_sampling": "sequence_masked"}
            | {"importance_sampling_cap": 3.0},
        ),
        ({"chat_template_kwargs": '{"enable_thinking": false}'}, {"chat_template_kwargs": {"enable_thinking": False}}),
    ],
)
def test_what_options_become(given: dict[str, Any], expected: dict[str, Any]) -> None:
    made, _ = mrl_options(GRPOConfig(**given), multi_turn=True)
    assert {name: made.get(name) for name in expected} == expected
    made |= {"environment_factory": "x.py:X"} if "max_turns" in made else {}
    OrchestratorConfig.from_flat(**made)


def test_vllm_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mrl.trl.options.find_spec", lambda name: None)
    made, notes = mrl_options(GRPOConfig(use_vllm=True, vllm_gpu_memory_utilization=0.2), multi_turn=True)
    assert "engine" not in made
    assert notes == [
        "use_vllm=True: vLLM is not installed here, so mrl samples with its own engine (engine: transformers)"
    ]
    monkeypatch.setattr("mrl.trl.options.find_spec", lambda name: True)
    made, _ = mrl_options(GRPOConfig(use_vllm=True, vllm_gpu_memory_utilization=0.2), multi_turn=True)
    assert (made["engine"], made["gpu_memory_utilization"]) == ("vllm", 0.2)
    made, _ = mrl_options(GRPOConfig(use_vllm=True, vllm_enable_sleep_mode=True), multi_turn=True)
    assert (made["engine"], made["colocate"], made.get("gpu_memory_utilization")) == ("vllm", True, None)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steps_per_generation": 2}, "16 completions are generated at a time and an update is on 8"),
        ({"num_generations": 3}, "8 completions are generated at a time .* no whole groups of num_generations=3"),
        ({"generation_batch_size": 8, "steps_per_generation": 1}, "say the same: give only one"),
        ({"num_train_epochs": 0.5}, "mrl counts whole ones; say max_steps"),
        ({"push_to_hub": True}, "`mrl checkpoints RUN push USER/NAME` does it"),
        ({"fp16": True}, "bfloat16 or float32"),
        ({"optim": "sgd"}, "the optimizer is AdamW"),
        ({"deepspeed": "ds.json"}, "deepspeed='ds.json' is not taken over; how an actor on several GPUs divides"),
        ({"sync_ref_model": True}, "the reference stays the policy before training"),
        ({"repetition_penalty": 1.1}, "mrl has nothing of the kind"),
        ({"resume_from_checkpoint": "x"}, "it is called 'resume' here"),
        ({"model_init_kwargs": {"quantization_config": {}}}, "quantization_config is not taken over"),
    ],
)
def test_what_has_no_meaning_here_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"args: .*{message}"):
        mrl_options(GRPOConfig(**given), multi_turn=True)


def test_names_that_trl_has_not() -> None:
    with pytest.raises(TypeError, match="no argument 'learnin_rate'; did you mean 'learning_rate'"):
        GRPOConfig(learnin_rate=1)
    config = GRPOConfig("out", beta=0.1)
    config.run_name = "a"
    assert repr(config) == "GRPOConfig(output_dir='out', beta=0.1, run_name='a')" or "run_name='a'" in repr(config)
    with pytest.raises(AttributeError, match="no option 'runname'; did you mean 'run_name'"):
        config.runname = "a"


def test_where_a_function_makes_the_rollouts_the_run_is_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mrl.trl.options.find_spec", lambda name: None)
    server: dict[str, Any] = {"use_vllm": True, "vllm_mode": "server"}
    made, notes = mrl_options(GRPOConfig(**server), rollout_func=True)
    assert (made["serve"], made.get("engine")) == ("127.0.0.1:8000", None)
    assert notes[0] == (
        "vllm_mode='server': the run itself is the server that answers the function, at http://127.0.0.1:8000 (serve)"
    )
    made, _ = mrl_options(GRPOConfig(vllm_server_base_url="http://localhost:9000/", **server), rollout_func=True)
    assert made["serve"] == "127.0.0.1:9000"
    made, _ = mrl_options(GRPOConfig(vllm_server_host="gpu", **server), rollout_func=True)
    assert (made["engine"], made["vllm_urls"], made.get("serve")) == ("vllm-remote", ["http://gpu:8000"], None)
    parts = GRPOConfig(gradient_accumulation_steps=2, steps_per_generation=1)
    made, notes = mrl_options(parts, rollout_func=True)
    assert "max_concurrent_rollouts" not in made
    assert notes == ["steps_per_generation=1: the rollout_func is asked once for all 16 completions of an update"]


def test_rounds_of_calls_where_nothing_can_be_called() -> None:
    made, notes = mrl_options(GRPOConfig(max_tool_calling_iterations=3))
    assert "max_turns" not in made
    assert notes == ["max_tool_calling_iterations=3: there are neither tools nor environments"]


def reward(completions: list[Any], **_: Any) -> list[float]:
    return [0.0 for _ in completions]


def trainer(tiny_model: str, **arguments: Any) -> GRPOTrainer:
    rows = [{"prompt": "a"}]
    return GRPOTrainer(**{"model": tiny_model, "reward_funcs": reward, "train_dataset": rows} | arguments)


def test_rewards_are_added_up(tiny_model: str, tmp_path: Path) -> None:
    made = trainer(tiny_model, reward_funcs=[reward, reward], callbacks=[RichProgressCallback()])
    assert made.trainer.config.reward.reward_weights == [1.0, 1.0]
    given = trainer(tiny_model, reward_funcs=[reward, reward], args=GRPOConfig(reward_weights=[0.5, 2.0]))
    assert given.trainer.config.reward.reward_weights == [0.5, 2.0]


def test_reward_models_are_passed_on(tiny_model: str) -> None:
    made = trainer(tiny_model, reward_funcs=["some/model", reward], reward_processing_classes=["theirs", None])
    given = made.trainer.config.reward
    assert given.reward_funcs == ["some/model", reward]
    assert (given.reward_processing_classes, given.reward_weights) == (["theirs", None], [1.0, 1.0])


def test_a_rollout_function_is_passed_on(tiny_model: str) -> None:
    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        return {}

    config = trainer(tiny_model, rollout_func=rollout).trainer.config.rollout
    assert (config.source, config.rollout_func) == ("rollout_func", rollout)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("trl") is None, reason="whose class it is")
def test_a_script_that_takes_only_the_trainer_from_here(tiny_model: str, tmp_path: Path) -> None:
    import trl

    args = trl.GRPOConfig(str(tmp_path / "r"), use_cpu=True, bf16=False, beta=0.1, num_generations=4, max_steps=3)
    config = trainer(tiny_model, args=args, rollout_func=lambda prompts, trainer: {}).trainer.config
    assert (config.algorithm.beta, config.flat()["num_generations"], config.flat()["batch_size"]) == (0.1, 4, 2)
    assert (config.training.max_steps, config.run.run_dir) == (3, str(tmp_path / "r"))
    with pytest.raises(ConfigError, match=r"unknown option 'args=.*mrl\.trl's GRPOTrainer"):
        MRLTrainer(args=args)  # type: ignore[call-arg]


def test_what_comes_after_training_is_named(tiny_model: str) -> None:
    trainer = GRPOTrainer(tiny_model, len, GRPOConfig(num_generations=8), [{"prompt": "x"}])
    with pytest.raises(AttributeError, match=r"'push_to_hub': `mrl checkpoints RUN push USER/NAME`"):
        trainer.push_to_hub()
    assert not hasattr(trainer, "model")


def test_a_folder_with_a_run_is_not_written_over(tiny_model: str, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert trainer(tiny_model, args=GRPOConfig(str(tmp_path / "out"))).trainer.run_dir == tmp_path / "out"
    (tmp_path / "out" / "x").touch()
    with pytest.warns(UserWarning, match="there is something already, so this run is in .*out-2"):
        assert trainer(tiny_model, args=GRPOConfig(str(tmp_path / "out"))).trainer.run_dir == tmp_path / "out-2"


def test_an_adapter_and_a_tokenizer(tiny_model: str) -> None:
    from peft import LoraConfig
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = trainer(tiny_model, peft_config=config, processing_class=tokenizer).trainer.config.model
    assert (model.model, model.use_lora, model.lora_r, model.lora_alpha) == (tiny_model, True, 4, 8)
    assert (model.lora_target_modules, model.lora_dropout) == (["q_proj"], 0.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"callbacks": [print]}, "callbacks: mrl calls no builtin_function_or_method"),
        ({"optimizers": (1, None)}, "optimizers: the optimizer is AdamW"),
        ({"quantization_config": 1}, "weights are not quantised"),
        ({"args": 3}, "args: give a GRPOConfig, not an object of type int"),
        ({"peft_config": 3}, "peft_config: mrl trains LoRA adapters, not int"),
    ],
)
def test_arguments_that_are_refused(arguments: dict[str, Any], message: str, tiny_model: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer(tiny_model, **arguments)
