"""`args`: options by TRL's names."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from mrl import GRPOConfig, MRLTrainer
from mrl.config.trl_args import DEFAULTS, options_from
from mrl.errors import ConfigError


def test_trls_names_and_defaults() -> None:
    with pytest.warns(UserWarning, match="use_vllm, vllm_mode: the run's own engine samples"):
        options = options_from(
            GRPOConfig(
                output_dir="out",
                use_vllm=True,
                vllm_mode="server",
                num_train_epochs=2.0,
                beta=0.04,
                per_device_train_batch_size=8,
                gradient_accumulation_steps=4,
                epsilon_high=None,
            )
        )
    assert options == {
        "run_dir": "out",
        "num_epochs": 2,
        "beta": 0.04,
        "batch_size": 4,
        "num_generations": 8,
        "max_completion_length": 512,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "linear",
    }


def test_options_beside_it_come_first() -> None:
    config = MRLTrainer(
        model="starter", dataset_name="tiny-code", args={"learning_rate": 2e-6}, learning_rate=3e-6
    ).config
    assert config.training.learning_rate == 3e-6
    assert config.algorithm.max_completion_length == 512


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"optim": "sgd"}, "optim='sgd' is not taken over; the optimizer is AdamW"),
        ({"neftune_noise_alpha": 5}, "mrl has nothing of the kind"),
        ({"num_train_epochs": 0.5}, "max_steps for a part"),
        ({"per_device_train_batch_size": 6}, "num_generations=8 does not divide"),
        ({"steps_per_generation": 4}, "leave out generation_batch_size and steps_per_generation"),
    ],
)
def test_what_has_no_meaning_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options_from(GRPOConfig(**given))
    with pytest.raises(ConfigError, match="give a GRPOConfig, not a int"):
        options_from(3)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("trl") is None, reason="whose class it is")
def test_trls_own_class(tmp_path: Any) -> None:
    from dataclasses import fields

    import trl

    own = {field.name: field.default for field in fields(trl.GRPOConfig)}
    assert {name: own[name] for name in DEFAULTS} == DEFAULTS
    args = trl.GRPOConfig(use_cpu=True, num_generations=4, beta=0.1, per_device_train_batch_size=4, top_k=5)
    args.output_dir = "out"
    assert options_from(args) == options_from({}) | {
        "device": "cpu",
        "run_dir": "out",
        "num_generations": 4,
        "beta": 0.1,
        "top_k": 5,
        "batch_size": 1,
    }
