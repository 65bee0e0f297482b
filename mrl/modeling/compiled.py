"""A model's layers through `torch.compile`, only while the actor uses them.

Layers are compiled one by one, not the model: they are all alike, so one compilation serves all, and what transformers
does around them (masks, caches, hooks) needs none. Module and parameter names stay as they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from mrl.modeling.forward import causal_lm_of


class CompiledLayers:
    """The repeated layers of one model."""

    def __init__(self, model: Any) -> None:
        """Raises ValueError when the model does not say which layers it repeats."""
        names = set(getattr(causal_lm_of(model), "_no_split_modules", None) or ())
        layers = [module for module in causal_lm_of(model).modules() if type(module).__name__ in names]
        if not layers:
            raise ValueError("the model does not name the layers it is made of (_no_split_modules)")
        # Every micro-batch has another shape: sizes are symbols from the start.
        self.layers = [(layer, torch.compile(layer._call_impl, dynamic=True)) for layer in layers]

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Calls of the layers are compiled meanwhile. Elsewhere (sampling with a cache) they are as they were."""
        for layer, compiled in self.layers:
            layer._compiled_call_impl = compiled
        try:
            yield
        finally:
            for layer, _ in self.layers:
                layer._compiled_call_impl = None


def try_compiled(model: Any, device: torch.device) -> tuple[CompiledLayers | None, str | None]:
    """The compiled layers, or why there are none: forward and backward are run once on a few tokens."""
    ids_BL = torch.arange(6, device=device)[None] % causal_lm_of(model).config.get_text_config().vocab_size
    try:
        layers = CompiledLayers(model)
        with layers.active(), torch.enable_grad():
            hidden = causal_lm_of(model).get_decoder()(input_ids=ids_BL, use_cache=False).last_hidden_state
            hidden.float().square().mean().backward()
    except Exception as error:  # compilers fail in many ways, and the layers work without
        first = (str(error).strip().splitlines() or [""])[0][:200]
        return None, f"torch_compile: the layers run uncompiled ({type(error).__name__}: {first})"
    finally:
        model.zero_grad(set_to_none=True)
    return layers, None
