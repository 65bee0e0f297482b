"""LoRA on the actor: adding an adapter, and reading the weights as if it were merged."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mrl.config import ModelConfig
from mrl.errors import ConfigError


def add_lora(model: Any, config: ModelConfig) -> Any:
    """Wrap `model` with a fresh adapter; only that trains. Raises ConfigError for target modules there are not."""
    from peft import get_peft_model

    try:
        return get_peft_model(model, lora_config(config))
    except ValueError as error:
        linear = sorted({n.rsplit(".", 1)[-1] for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)})
        raise ConfigError(f"lora_target_modules: {error}. Linear layers of this model: {', '.join(linear)}") from None


def lora_config(config: ModelConfig, task_type: str = "CAUSAL_LM") -> Any:
    """The adapter that the options describe, as peft has it."""
    from peft import LoraConfig

    return LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules=config.lora_target_modules or "all-linear",
        task_type=task_type,
    )


@torch.no_grad()
def merged_state_dict(model: Any) -> dict[str, Tensor]:
    """The model's tensors under their own names, each adapted matrix with its adapter added.

    The module itself is left as it is, so training goes on with the adapter apart. Without an adapter the tensors are
    the live ones; with one, adapted matrices are new.
    """
    if not hasattr(model, "get_base_model"):
        return {name: tensor.detach() for name, tensor in model.state_dict().items()}
    base = model.get_base_model()
    merged: dict[str, Tensor] = {}
    for name, tensor in base.state_dict().items():
        if ".lora_" in name:
            continue
        if ".base_layer." not in name:
            merged[name] = tensor.detach()
            continue
        layer_name, _, parameter = name.partition(".base_layer.")
        layer = base.get_submodule(layer_name)
        full = tensor.detach()
        if parameter == "weight":
            for adapter in layer.active_adapters:
                full = full + layer.get_delta_weight(adapter).to(full.dtype)
        merged[f"{layer_name}.{parameter}"] = full
    return merged
