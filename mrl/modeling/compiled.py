"""`torch.compile` for a model's layers, active only while the actor uses them.

Layers are compiled one by one, not the whole model: they are alike, so one compilation serves all, and what
transformers does around them (masks, caches, hooks) is left out. Module and parameter names do not change.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from mrl.modeling.forward import Forward, causal_lm_of
from mrl.modeling.token_batch import make_token_batch
from mrl.types import Sample, TrainBatch


class CompiledLayers:
    """The repeated layers of one model."""

    def __init__(self, model: Any) -> None:
        """Raises ValueError when the model does not say which layers it repeats."""
        names = set(getattr(causal_lm_of(model), "_no_split_modules", None) or ())
        layers = [module for module in causal_lm_of(model).modules() if type(module).__name__ in names]
        if not layers:
            raise ValueError("the model does not name the layers it is made of (_no_split_modules)")
        # Every micro-batch has another shape, so sizes are dynamic from the start.
        self.layers = [(layer, torch.compile(layer._call_impl, dynamic=True)) for layer in layers]

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Layers run compiled inside. Outside (sampling with a KV cache) they run as usual."""
        for layer, compiled in self.layers:
            layer._compiled_call_impl = compiled
        try:
            yield
        finally:
            for layer, _ in self.layers:
                layer._compiled_call_impl = None


def try_compiled(model: Any, forward: Forward) -> tuple[CompiledLayers | None, str | None]:
    """The compiled layers, or why there are none. Runs one forward and backward pass as training will, on a few tokens
    of two rows that share their prompt."""
    words = causal_lm_of(model).config.get_text_config().vocab_size
    samples = [
        Sample([1 % words] * 3, [n % words for n in range(2, 5 + row)], [0.0] * (3 + row), [1] * (3 + row), 0)
        for row in range(2)
    ]
    tokens = make_token_batch(TrainBatch(samples, [0.0] * 2, 2, 1), forward.device)
    try:
        layers = CompiledLayers(model)
        model.train()
        with layers.active(), torch.enable_grad():
            forward.logprobs(model, tokens)[0].square().mean().backward()
    except Exception as error:  # compilers fail in many ways, and the layers work without
        first = (str(error).strip().splitlines() or [""])[0][:200]
        return None, f"torch_compile: the layers run uncompiled ({type(error).__name__}: {first})"
    finally:
        model.eval()
        model.zero_grad(set_to_none=True)
    return layers, None
