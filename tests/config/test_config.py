"""Options: one set of names, errors that name the field, nothing accepted and ignored."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from mrl import ModelConfig, OrchestratorConfig, TrainingConfig
from mrl.config import flat_fields, load_recipe
from mrl.errors import ConfigError

DEFAULTS = {
    "model": "Qwen/Qwen2.5-0.5B-Instruct",
    "reward_funcs": None,
    "train_dataset": None,
    "actor_gpu": None,
    "rollout_gpu": None,
    "num_rollout_workers": 1,
    "num_generations": 4,
    "batch_size": 8,
    "learning_rate": 5e-6,
    "max_steps": -1,
    "num_epochs": 5,
    "loss_type": "dapo",
    "weight_sync_method": "reload",
    "sync_weights_every": 1,
    "use_lora": False,
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "beta": 0.0,
    "epsilon": 0.2,
    "scale_rewards": "group",
    "mask_truncated_completions": False,
    "max_tokens": None,
    "max_model_len": 16384,
    "max_completion_length": 1024,
    "temperature": 1.0,
    "top_p": 1.0,
    "save_steps": 100,
    "max_samples": None,
}


def test_names_and_defaults() -> None:
    flat = OrchestratorConfig().flat()
    for name, value in DEFAULTS.items():
        assert flat[name] == value, name


def test_flat_names_are_unique_and_every_option_is_documented() -> None:
    names = [name for part in OrchestratorConfig.model_fields.values() for name in part.annotation.model_fields]
    assert len(names) == len(set(names))
    for name, (_, field) in flat_fields().items():
        assert field.description, f"{name} has no sentence of documentation"
        assert field.description.rstrip().endswith("."), name


def test_sections_flat_names_and_both_say_the_same() -> None:
    by_section = OrchestratorConfig(model=ModelConfig(model="m"), training=TrainingConfig(learning_rate=1e-4))
    flat = OrchestratorConfig.from_flat(model="m", learning_rate=1e-4)
    mixed = OrchestratorConfig.from_flat(model={"model": "m"}, training={"learning_rate": 1e-4})
    assert by_section == flat == mixed
    assert OrchestratorConfig(model="m").model.model == "m"


def test_it_survives_yaml(tmp_path: Path) -> None:
    config = OrchestratorConfig.from_flat(model="m", learning_rate=1e-4, stop=["\n"], rename={"a": "b"}, top_k=5)
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config.to_dict()))
    assert OrchestratorConfig.from_flat(**load_recipe(path)[0]).to_dict() == config.to_dict()


def test_callables_and_datasets_are_described_where_they_cannot_be_written() -> None:
    def my_reward() -> None: ...

    plain = OrchestratorConfig.from_flat(reward_funcs=[my_reward], train_dataset=[{"prompt": "x"}]).to_dict()
    assert "my_reward" in plain["reward"]["reward_funcs"][0]
    assert "test_config.py" in plain["reward"]["reward_funcs"][0]
    assert "1 rows" in plain["data"]["train_dataset"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rat": 1}, "did you mean 'learning_rate'"),
        ({"training": {"learning_rat": 1}}, "did you mean 'learning_rate'"),
        ({"learning_rate": "fast"}, r"learning_rate: .*found 'fast'"),
        ({"learning_rate": -1}, "learning_rate: .*greater than 0.*found -1"),
        ({"num_generations": 1}, "num_generations: .*greater than or equal to 2"),
        ({"loss_type": "ppo2"}, "loss_type: use one of bnpo, cispo, dapo"),
        ({"scale_rewards": "yes"}, "scale_rewards: .*'group', 'batch' or 'none'"),
        ({"max_steps": 0}, "max_steps: use -1"),
        ({"lora_r": 8}, "lora_r has an effect only with use_lora: true"),
        ({"loss_type": "sapo", "epsilon": 0.1}, "epsilon has an effect only with a clipped loss_type"),
        ({"sapo_temperature_pos": 2.0}, "only with loss_type: sapo"),
        ({"importance_sampling": "none", "importance_sampling_cap": 3.0}, "importance_sampling_cap has an effect only"),
        ({"epsilon": 1.5}, "epsilon: 1.5 lets the ratio fall to 0"),
        ({"train_dataset": [], "dataset_name": "x"}, "give only one"),
        ({"run_dir": "a", "run_name": "b"}, "give only one"),
        ({"prompt_format": "text", "system_prompt": "hi"}, "system_prompt has no effect"),
        ({"training": 3}, "training is a group of options"),
        ({"learning_rate": 1e-5, "training": {"learning_rate": 1e-4}}, "learning_rate is given twice, flat and in tr"),
        ({"training": {"learning_rate": 1e-5}, "learning_rate": 1e-5}, "learning_rate is given twice, flat and in tr"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OrchestratorConfig.from_flat(**options)


def test_a_section_built_by_hand_gives_the_same_kind_of_error() -> None:
    with pytest.raises(ConfigError, match=r"batch_size: .*found 0"):
        TrainingConfig(batch_size=0)


def test_max_tokens_follows_max_completion_length_unless_it_is_given() -> None:
    assert OrchestratorConfig().sampled_tokens == 1024
    assert OrchestratorConfig.from_flat(max_completion_length=64).sampled_tokens == 64
    both = OrchestratorConfig.from_flat(max_completion_length=64, max_tokens=100)
    assert both.sampled_tokens == 100
    assert any("max_tokens (100) is above max_completion_length (64)" in note for note in both.notices())


def test_defaults_need_no_notices() -> None:
    assert OrchestratorConfig().notices() == []
    assert OrchestratorConfig.from_flat(importance_sampling="none").notices() == []


def test_options_without_a_meaning_here_are_said() -> None:
    notes = OrchestratorConfig.from_flat(actor_gpu="H100").notices()
    assert any("actor_gpu" in note and "inline" in note for note in notes)
    notes = OrchestratorConfig.from_flat(top_p=0.9, importance_sampling="none").notices()
    assert any("biased" in note for note in notes)


def test_recipes_read_numbers_as_people_write_them(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("learning_rate: 1e-5\nalgorithm:\n  epsilon: 2e-1\nmodel: starter-2e\n")
    config = OrchestratorConfig.from_flat(**load_recipe(path)[0])
    assert config.training.learning_rate == 1e-5
    assert config.algorithm.epsilon == 0.2
    assert config.model.model == "starter-2e"


def test_a_recipe_knows_the_lines_of_its_keys(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("# a\nbase: &base {seed: 1}\ntraining:\n  <<: *base\n  seed: 2\n")
    options, lines = load_recipe(path)
    assert options["training"] == {"seed": 2}
    assert lines == {"base": 2, "base.seed": 2, "training": 3, "training.seed": 5}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: m\nlearning_rate: ]1", "line 2: not valid YAML"),
        ("- a\n- b", "a recipe is a list of"),
        ("learning_rate: 1e-5\n\tx: 2", "not valid YAML"),
        ("seed: 1\nseed: 1", "line 2: seed is given twice, first in line 1"),
        ("training:\n  seed: 1\n\n  seed: 2", r"line 4: training\.seed is given twice, first in line 2"),
        ("trl_args: &args\n  again: *args", "line 1: trl_args.again is an alias of what it stands in"),
        ("trl_args: {packing: true, packing: false}", r"line 1: trl_args\.packing is given twice"),
    ],
)
def test_unreadable_recipes_name_the_file(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"broken\.yaml.*{message}"):
        load_recipe(path)


def test_a_recipe_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot be read"):
        load_recipe("nowhere.yaml")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size has an effect only with engine: vllm"),
        ({"engine": "vllm", "vllm_urls": ["http://a"]}, "vllm_urls has an effect only with engine: vllm-remote"),
        ({"engine": "vllm-remote"}, "needs vllm_urls"),
        ({"engine": "vllm", "vllm_devices": [1], "tensor_parallel_size": 2}, "1 GPUs are not enough for engine 0"),
        (
            {"engine": "vllm", "num_rollout_workers": 2, "vllm_devices": [1, 1]},
            r"2 engine\(s\) share GPU 1.*set gpu_memory_utilization",
        ),
        ({"delta_full_every": 3}, "delta_full_every has an effect only with weight_sync_method: delta"),
        ({"weight_sync_method": "direct", "weight_sync_dir": "x"}, "weight_sync_dir has an effect only with"),
    ],
)
def test_engine_and_sync_options_that_do_nothing_are_refused(options: dict[str, object], message: str) -> None:
    from mrl.loop.spawning import engine_options

    with pytest.raises(ConfigError, match=message):
        engine_options(OrchestratorConfig.from_flat(**options), 0)


def test_each_engine_gets_its_own_devices_or_server() -> None:
    from mrl.loop.resources import rollout_workers
    from mrl.loop.spawning import engine_options

    own = OrchestratorConfig.from_flat(
        engine="vllm", num_rollout_workers=2, tensor_parallel_size=2, vllm_devices=[4, 5, 6, 7]
    )
    assert [engine_options(own, i)["vllm_devices"] for i in range(2)] == [[4, 5], [6, 7]]
    remote = OrchestratorConfig.from_flat(engine="vllm-remote", vllm_urls=["a", "b", "c"], num_rollout_workers=1)
    assert rollout_workers(remote) == 3
    assert [engine_options(remote, i)["url"] for i in range(3)] == ["a", "b", "c"]
    assert engine_options(OrchestratorConfig(), 0) == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight_sync_method": "delta"}, "needs weight_sync_method reload or volume, found delta"),
        ({"engine": "vllm", "use_lora": True}, "needs lora_sync: merged"),
    ],
)
def test_stale_samplers_need_a_file_of_their_weights(options: dict[str, object], message: str) -> None:
    from mrl.loop.preflight import prepare

    config = OrchestratorConfig.from_flat(model="starter", dataset_name="tiny-code", sync_weights_every=2, **options)
    with pytest.raises(ConfigError, match=message):
        prepare(config)


def test_an_environment_without_vllm_is_refused_before_the_run_starts(tiny_model: str, tmp_path: Path) -> None:
    from mrl import MRLTrainer

    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    bare = tmp_path / "bare" / "bin" / "python"
    for python, message in (
        (tmp_path / "nowhere", "vllm_python.*nowhere does not start"),
        (bare, "engine='vllm': vllm needs vLLM, and .*bare.* has none"),
    ):
        with pytest.raises(ConfigError, match=message):
            MRLTrainer(
                model=tiny_model,
                train_dataset=[{"prompt": "a"}],
                reward_funcs=lambda completions, **_: [0.0] * len(completions),
                engine="vllm",
                vllm_python=str(python),
                run_dir=str(tmp_path / "run"),
                max_steps=1,
            ).train()
    assert not (tmp_path / "run").exists()
