"""A model's layers through `torch.compile`, only while the actor uses them.

Layers are compiled one by one, not the model: they are all alike, so one compilation serves all, and what transformers
does around them (masks, caches, hooks) needs none. Module and parameter names stay as they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from mrl.modeling.forward import Forward, causal_lm_of
from mrl.modeling.rows import make_rows
from mrl.types import Sample, TrainBatch


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


def try_compiled(model: Any, forward: Forward) -> tuple[CompiledLayers | None, str | None]:
    """The compiled layers, or why there are none: forward and backward are run once as training will run them, on a
    few tokens of two rows that share their prompt."""
    words = causal_lm_of(model).config.get_text_config().vocab_size
    samples = [
        Sample([1 % words] * 3, [n % words for n in range(2, 5 + row)], [0.0] * (3 + row), [1] * (3 + row), 0)
        for row in range(2)
    ]
    rows = make_rows(TrainBatch(samples, [0.0] * 2, 2, 1), forward.device)
    try:
        layers = CompiledLayers(model)
        model.train()
        with layers.active(), torch.enable_grad():
            forward.logprobs(model, rows)[0].square().mean().backward()
    except Exception as error:  # compilers fail in many ways, and the layers work without
        first = (str(error).strip().splitlines() or [""])[0][:200]
        return None, f"torch_compile: the layers run uncompiled ({type(error).__name__}: {first})"
    finally:
        model.eval()
        model.zero_grad(set_to_none=True)
    return layers, None
