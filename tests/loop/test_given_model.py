"""A model and its tokenizer as objects: trained as a copy, recorded, resumed; refused where no file holds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mrl import MRLTrainer, OrchestratorConfig
from mrl.config import ModelConfig
from mrl.errors import ConfigError, RewardError
from mrl.models import load_model


def length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(text))) for text in completions]


@pytest.fixture(scope="module")
def given(tiny_model: str) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    return {"model": model, "tokenizer": AutoTokenizer.from_pretrained(tiny_model)}


def trainer(folder: Path, **options: Any) -> MRLTrainer:
    defaults = {
        "device": "cpu",
        "train_dataset": [{"prompt": f"say {i}"} for i in range(4)],
        "reward_funcs": length,
        "run_dir": str(folder),
        "report_to": [],
        "max_steps": 1,
        "batch_size": 2,
        "max_completion_length": 6,
        "learning_rate": 1e-2,
    }
    return MRLTrainer(**(defaults | options))


@pytest.mark.parametrize("options", [{}, pytest.param({"mode": "simple"}, marks=pytest.mark.slow)])
def test_it_is_trained_recorded_and_resumed(given: dict[str, Any], options: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    before = {name: tensor.clone() for name, tensor in given["model"].state_dict().items()}
    result = trainer(folder, **given, **options).train()
    assert all(torch.equal(tensor, before[name]) for name, tensor in given["model"].state_dict().items())
    begun = yaml.safe_load((folder / "config.yaml").read_text())["model"]["model"]
    assert torch.equal(load_model(ModelConfig(model=begun)).lm_head.weight, given["model"].lm_head.weight)
    trained = load_model(ModelConfig(model=str(result.checkpoint)))
    assert not torch.equal(trained.lm_head.weight, given["model"].lm_head.weight)

    assert trainer(folder, **given, **options, resume="auto", max_steps=2).train().steps == 2
    # Without the objects, as from a shell; what Python gave besides has to be given again.
    again = {"train_dataset": [{"prompt": f"say {i}"} for i in range(4)], "reward_funcs": length, "report_to": []}
    assert MRLTrainer(resume=str(folder), max_steps=3, **again).train().steps == 3
    other = {**given, "model": load_model(ModelConfig(model=str(result.checkpoint)))}
    with pytest.raises(ConfigError, match=r"other weights than the one .* began with"):
        trainer(folder, **other, **options, resume="auto", max_steps=3).train()
    with pytest.raises(ConfigError, match="already holds a run"):
        trainer(folder, **given, **options).train()


def test_a_run_that_does_not_start_leaves_nothing(given: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(RewardError, match="nowhere"):
        trainer(tmp_path / "run", **given, reward_funcs="nowhere.py:f").train()
    assert not (tmp_path / "run").exists()


def test_what_files_cannot_stand_for_is_refused(given: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, Qwen2ForCausalLM

    class Changed(Qwen2ForCausalLM):
        pass

    config = given["model"].config
    for options, message in (
        ({"tokenizer": None}, "needs its tokenizer"),
        ({"tokenizer": "a"}, "tokenizer='a': give one of transformers"),
        ({"model": torch.nn.Linear(2, 2)}, "not an object of type Linear"),
        ({"model": Changed(config)}, "a Changed cannot be loaded again"),
        ({"model": AutoModelForSequenceClassification.from_config(config)}, "Classification cannot be loaded again"),
        ({"revision": "main"}, "revision='main': a loaded model is what it is"),
    ):
        with pytest.raises(ConfigError, match=message):
            trainer(tmp_path / "run", **(given | options))
    smaller = Qwen2ForCausalLM(
        type(config)(**(config.to_dict() | {"vocab_size": 8, "pad_token_id": None, "eos_token_id": 0}))
    )
    with pytest.raises(ConfigError, match="tokens, and the model embeddings for 8"):
        trainer(tmp_path / "run", **(given | {"model": smaller}))
    with pytest.raises(ConfigError, match="argument of MRLTrainer"):
        OrchestratorConfig(model=given["model"])
