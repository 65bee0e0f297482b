"""Errors in the reader's words: keys of a recipe, flags in a shell, arguments in Python; and other trainers' names."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import mrl
from mrl.cli import last_resort
from mrl.cli.main import main
from mrl.config import OrchestratorConfig, flat_fields, keywords
from mrl.config.dialects import in_flags, in_python
from mrl.config.hints import _CALLED, _INSTEAD, named_elsewhere
from mrl.errors import ConfigError
from mrl.loop.orchestrator import Orchestrator
from mrl.loop.recorded_run import RunResult
from mrl.system import interrupts


@pytest.mark.parametrize(
    ("message", "flags", "python"),
    [
        ("learning_rate: bad; found -1", "--learning-rate: bad; found -1", "learning_rate=-1: bad; found -1"),
        ("too few; use max_tokens: 64", "too few; use --max-tokens 64", "too few; use max_tokens=64"),
        ("set eval_split or eval_steps.", "set --eval-split or --eval-steps.", "set eval_split or eval_steps."),
        ("lora_r needs use_lora: true", "--lora-r needs --use-lora", "lora_r needs use_lora=True"),
        ("use mode: simple, shuffle: false", "use --mode simple, --no-shuffle", "use mode='simple', shuffle=False"),
        ("max_tokens (9) is above it", "--max-tokens 9 is above it", "max_tokens=9 is above it"),
        (
            "the model, a stop, x/max_tokens.py",
            "the model, a stop, x/max_tokens.py",
            "the model, a stop, x/max_tokens.py",
        ),
        ("x\n  seed: 1 -> 2\n", "x\n  seed: 1 -> 2\n", "x\n  seed: 1 -> 2\n"),
        ("say allow_change: [seed, stop]", "say --allow-change seed stop", "say allow_change=['seed', 'stop']"),
        ("1. temperature: the other", "1. temperature: the other", "1. temperature: the other"),
        ("pass train_dataset", "pass train_dataset", "pass train_dataset"),
    ],
)
def test_a_message_for_recipes_is_said_in_flags_and_in_arguments(message: str, flags: str, python: str) -> None:
    assert in_flags(message) == flags
    assert in_python(message, {"learning_rate": -1}) == python
    assert in_flags(message, keys=flat_fields()) == message


FOREIGN = {
    "kl_coef": "'beta'",
    "model_name_or_path": "'model'",
    "per_device_train_batch_size": "'batch_size'",
    "num_train_epochs": "'num_epochs'",
    "rollout.n": "'num_generations'",
    "actor_rollout_ref.rollout.n": "'num_generations'",
    "clip_ratio": "'epsilon'",
    "max_async_level": "'max_staleness'",
    "use_vllm": "engine: vllm",
    "vllm_mode": "vllm-remote",
    "max_prompt_length": "never cut",
    "use_kl_loss": "beta is above 0",
    "reward_model": "reward_funcs",
}


@pytest.mark.parametrize("name", FOREIGN)
def test_other_trainers_names_are_answered_with_what_does_their_work(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        OrchestratorConfig.from_flat(**{name: 1})
    assert f"unknown option {name!r}; " in str(caught.value)
    assert FOREIGN[name] in str(caught.value)


def test_no_hint_leads_to_an_option_there_is_not_or_hides_one_there_is() -> None:
    assert set(_CALLED) <= set(flat_fields())
    foreign = [name for names in [*_CALLED.values(), *_INSTEAD] for name in names.split()]
    assert len(foreign) == len(set(foreign))
    assert not set(foreign) & set(flat_fields())
    assert named_elsewhere("gradient_accumulation_steps") is None, "which means here what it means there"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rate": -1}, "learning_rate=-1: should be greater than 0"),
        ({"learning_rat": 1}, "unknown option 'learning_rat='; did you mean 'learning_rate='?"),
        ({"use_vllm": True}, "unknown option 'use_vllm='; use engine='vllm'"),
        ({"model": "starter", "tokenizer": "x"}, "tokenizer='x': goes with a model that is an object too"),
        (
            {"model": 3},
            "model=3: give a name, a folder, or a language model of transformers, not an object of type int",
        ),
        ({"run_name": "x"}, "no dataset: set dataset_name (a Hub id"),
    ],
)
def test_python_is_told_of_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        mrl.MRLTrainer(**options).train()
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("recipe", "flags", "message"),
    [
        ("", "--learning-rate -1", "--learning-rate: should be greater than 0"),
        ("", "--learning-rat 1", "unknown option '--learning-rat'; did you mean '--learning-rate'?"),
        ("", "--kl-coef 1", "unknown option '--kl-coef'; it is called '--beta' here"),
        ("", "--use_vllm", "unknown option '--use-vllm'; use --engine vllm"),
        ("", "--rollout.n 4", "it is called '--num-generations' here"),
        ("kl_coef: 1", "", "unknown option 'kl_coef'; it is called 'beta' here"),
        ("rollout: {n: 4}", "", "unknown option 'rollout.n'; it is called 'num_generations' here"),
        ("learning_rate: -1", "", "learning_rate: should be greater than 0"),
        ("lora_r: 4", "", "lora_r has an effect only with --use-lora: set that, or leave lora_r out"),
        ("lora_r: 4", "--lora-r 5", "--lora-r has an effect only with --use-lora"),
    ],
)
def test_a_shell_is_told_of_flags_and_of_its_recipes_keys(
    recipe: str, flags: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe)
    with pytest.raises(SystemExit, match="2"):
        main(["train", str(path), *flags.split()])
    assert f" {message}" in capsys.readouterr().err


async def says_its_notices(self: Orchestrator) -> RunResult:
    """Stands for a run: what it says before it starts, and no more."""
    self.store = SimpleNamespace(event=lambda kind, message, **_: said.append(message))  # type: ignore[assignment]
    self.trackers = SimpleNamespace(note=said.append)  # type: ignore[assignment]
    for notice in self.config.notices():
        self._note(notice)
    return RunResult(self.run_dir, "interrupted", 0, None, {}, signal=2)


said: list[str] = []


def test_notices_speak_as_errors_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is shown; the record keeps the words of recipes, in which everybody can read it."""
    monkeypatch.setattr(Orchestrator, "run", says_its_notices)
    monkeypatch.setattr(interrupts, "leave", sys.exit)
    monkeypatch.setattr(last_resort, "leave", sys.exit)
    recorded = "max_tokens (9) is above max_completion_length (4): completions longer than 4 tokens are scored and "
    said.clear()
    mrl.MRLTrainer(max_tokens=9, max_completion_length=4, run_dir=str(tmp_path / "a")).train()
    assert said[0].startswith(recorded)
    assert said[1].startswith(recorded.replace("max_tokens (9)", "max_tokens=9").replace("length (4)", "length=4"))
    assert "Set max_tokens to 4" in said[1]
    said.clear()
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("max_completion_length: 4\n")
    with pytest.raises(SystemExit, match="130"):
        main(["train", str(recipe), "--max-tokens", "9", "--run-dir", str(tmp_path / "b")])
    assert said[0].startswith(recorded)
    assert said[1].startswith(recorded.replace("max_tokens (9)", "--max-tokens 9"))
    assert "Set --max-tokens to 4" in said[1]


def test_keywords_are_those_of_the_configuration() -> None:
    import importlib.util

    script = Path(__file__).parents[2] / "scripts" / "build_keywords.py"
    spec = importlib.util.spec_from_file_location("build_keywords", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = "run `python scripts/build_keywords.py`: the options have changed"
    assert Path(keywords.__file__).read_text(encoding="utf-8") == module.build(), made
    named = {*flat_fields(), *OrchestratorConfig.model_fields, "tokenizer"}
    assert set(keywords.Options.__annotations__) == named


def test_the_package_lists_its_public_names() -> None:
    assert set(mrl.__all__) <= set(dir(mrl))
    assert all(getattr(mrl, name) for name in dir(mrl))
