"""LoRA on the actor: adding an adapter, and reading the weights with it merged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mrl.config import ModelConfig
from mrl.errors import ConfigError
from mrl.system.transfers import on_host
from mrl.weights.hub_names import to_hub


def add_lora(model: Any, config: ModelConfig) -> Any:
    """Wrap `model` with a new adapter; only the adapter is trained. Raises ConfigError for what PEFT cannot adapt."""
    from peft import get_peft_model

    with _refusals_explained(model):
        return get_peft_model(model, lora_config(config))


def adapter_parameters(model: Any, config: ModelConfig) -> int:
    """How many parameters an adapter has. It is left in `model`, which may be without weights. Raises ConfigError."""
    from peft import inject_adapter_in_model

    with _refusals_explained(model):
        inject_adapter_in_model(lora_config(config), model, low_cpu_mem_usage=True)
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


@contextmanager
def _refusals_explained(model: Any) -> Iterator[None]:
    """Raise ConfigError for what PEFT cannot adapt."""
    linear = sorted({n.rsplit(".", 1)[-1] for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)})
    try:
        yield
    except ValueError as error:
        if "lora_dropout" in str(error):
            raise ConfigError(
                "lora_dropout: this model holds the experts of a layer in one tensor, which PEFT adapts only without "
                f"dropout; use lora_dropout: 0, or lora_target_modules without them: {', '.join(linear)}"
            ) from None
        raise ConfigError(f"lora_target_modules: {error}. Linear layers of this model: {', '.join(linear)}") from None


def lora_config(config: ModelConfig, task_type: str = "CAUSAL_LM") -> Any:
    """PEFT's LoraConfig for the configured options."""
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
    """The model's tensors under the module's own names, with adapters merged.

    The module itself does not change. Without an adapter the tensors are the live ones. With one, merged tensors are
    new, at least float32, and in host memory; the device holds one of them at a time.
    """
    live, adapted = merged_parts(model)
    on_device = any(not tensor.is_cpu for _, _, tensor in adapted.parts.values())
    merged = on_host(adapted) if on_device else dict(adapted)
    return {name: merged.get(name, tensor) for name, tensor in live.items()}


def merged_parts(model: Any) -> tuple[dict[str, Tensor], Merged]:
    """All tensors under the names of `merged_state_dict`, without adapters; and those that have one."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    live: dict[str, Tensor] = {}
    adapted = Merged(base)
    for name, tensor in base.state_dict().items():
        if base is not model and ".lora_" in name:
            continue
        place, wrapped, parameter = name.partition(".base_layer.")
        if base is not model and wrapped:
            parameter = parameter.replace("base_layer.", "")  # nested wrappers, one per adapted parameter
            name = f"{place}.{parameter}"
            adapted.parts[name] = (place, parameter, tensor.detach())
        live[name] = tensor.detach()
    return live, adapted


class Merged(Mapping[str, Tensor]):
    """Merged tensors, each computed when it is looked up."""

    def __init__(self, base: Any) -> None:
        self.base = base
        self.parts: dict[str, tuple[str, str, Tensor]] = {}
        """By name: the layer, the parameter's name in it, and its base tensor without adapters."""

    def __getitem__(self, name: str) -> Tensor:
        place, parameter, full = self.parts[name]
        layer = self.base.get_submodule(place)
        while hasattr(layer, "base_layer"):
            if parameter == getattr(layer, "parameter_name", "weight"):
                for adapter in layer.active_adapters:
                    wide = merged_dtype(full)
                    full = full.to(wide) + layer.get_delta_weight(adapter).to(wide)
            layer = layer.base_layer
        return full

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)


def merged_dtype(base: Tensor) -> torch.dtype:
    """Of a tensor with its adapters merged: rounding to a bfloat16 base would lose small adapter updates."""
    return torch.promote_types(base.dtype, torch.float32)


@torch.no_grad()
def public_state_dict(model: Any) -> dict[str, Tensor]:
    """`merged_state_dict` under the Hugging Face names that `save_pretrained` writes. Contiguous."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return {name: tensor.contiguous() for name, tensor in to_hub(inner, merged_state_dict(model)).items()}


def saved_state_dict(model: Any) -> dict[str, Tensor]:
    """The live tensors that `save_pretrained` writes: all, or with an adapter only the adapter's."""
    state: dict[str, Tensor] = model.state_dict()
    if not hasattr(model, "get_base_model"):
        return dict(state)
    from peft import get_peft_model_state_dict

    written = {id(tensor) for tensor in get_peft_model_state_dict(model, state_dict=state).values()}
    return {name: tensor for name, tensor in state.items() if id(tensor) in written}


def adapts_parameters(model: Any) -> bool:
    """Whether the adapter adapts bare parameters instead of layers, such as all experts stored in one tensor."""
    return any(hasattr(module, "parameter_name") and hasattr(module, "base_layer") for module in model.modules())
