"""A model's numbers, counted without its weights, against the model itself."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from mrl import OrchestratorConfig
from mrl.actor.lora import add_lora
from mrl.engines.vllm.shares import training_bytes
from mrl.errors import ConfigError
from mrl.loop.model_size import model_size
from mrl.modeling.precision import narrow_matrices
from mrl.models import autocast_dtype, load_model, pick_device


def config(**options: Any) -> OrchestratorConfig:
    return OrchestratorConfig.from_flat(engine="vllm", colocate=True, device="cpu", **options)


def test_a_models_size_is_that_of_its_weights(tiny_model: str) -> None:
    whole = model_size(config(model=tiny_model))
    model = load_model(config(model=tiny_model).model)
    assert whole.parameters == whole.trained == model.num_parameters()
    embeddings = model.get_input_embeddings().weight.numel()
    norms = sum(p.numel() for n, p in model.named_parameters() if "norm" in n)
    assert whole.linear == whole.parameters - embeddings - norms, "its head is tied"
    assert whole.cached_numbers == 2 * 2 * 2 * 8


ATTENTION, ALL = ["q_proj", "k_proj", "v_proj", "o_proj"], None


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("targets", [ATTENTION, ALL], ids=["attention", "all"])
@pytest.mark.parametrize("model", ["tiny_model", "untied_model", "experts_model"])
def test_what_an_adapter_trains_on_is_what_the_actor_holds(
    model: str, targets: list[str] | None, dtype: str, request: pytest.FixtureRequest
) -> None:
    """Two bytes for each weight of a linear layer, an untied head among them; embeddings, norms and experts four. The
    adapters of experts, which are all in one tensor, count too."""
    adapter = {"use_lora": True, "lora_r": 4, "lora_dropout": 0.0, "lora_target_modules": targets}
    options = config(model=request.getfixturevalue(model), dtype=dtype, **adapter)
    narrow = functools.partial(narrow_matrices, dtype=autocast_dtype(options.model, pick_device("cpu")))
    adapted = add_lora(load_model(options.model, before_moving=narrow), options.model)
    trained = [p for p in adapted.parameters() if p.requires_grad]
    assert {p.element_size() for p in trained} == {4}
    size = model_size(options)
    assert size.trained == sum(p.numel() for p in trained)
    assert training_bytes(size, options) == sum(p.nbytes for p in adapted.parameters()) + 12 * size.trained


def test_an_adapter_that_cannot_be_is_refused_as_the_actor_refuses_it(experts_model: str, tiny_model: str) -> None:
    with pytest.raises(ConfigError, match="lora_dropout: 0"):
        model_size(config(model=experts_model, use_lora=True, lora_dropout=0.1))
    with pytest.raises(ConfigError, match="Linear layers of this model: down_proj"):
        model_size(config(model=tiny_model, use_lora=True, lora_target_modules=["nothing"]))
