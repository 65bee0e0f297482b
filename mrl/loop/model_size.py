"""The numbers that determine a model's memory, before it is loaded."""

from __future__ import annotations

from typing import Any

from mrl.config import OrchestratorConfig
from mrl.engines.vllm.shares import ModelSize
from mrl.models import load_config, without_weights


def model_size(config: OrchestratorConfig) -> ModelSize:
    """Counted on a model without weights in memory. Raises ConfigError for an adapter that cannot be, ModelError."""
    from torch import nn

    from mrl.actor.lora import adapter_parameters

    module = without_weights(config.model)
    parameters = sum(p.numel() for p in module.parameters())
    tied = {id(layer.weight) for layer in module.modules() if isinstance(layer, nn.Embedding)}
    layers = (layer for layer in module.modules() if type(layer) is nn.Linear and id(layer.weight) not in tied)
    linear = sum(p.numel() for layer in layers for p in layer.parameters())
    trained = adapter_parameters(module, config.model) if config.model.use_lora else parameters
    return ModelSize(parameters, trained, _cached_numbers(load_config(config.model).get_text_config()), linear)


def _cached_numbers(model: Any) -> int:
    """KV cache entries of one token; 0 for configs without the usual fields."""
    all_heads = int(getattr(model, "num_attention_heads", None) or 0)
    heads = int(getattr(model, "num_key_value_heads", None) or all_heads)
    width = int(getattr(model, "head_dim", None) or getattr(model, "hidden_size", 0) // max(1, all_heads))
    return 2 * int(getattr(model, "num_hidden_layers", 0)) * heads * width
