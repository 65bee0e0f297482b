"""In which precision a model's linear layers are held, and what its head gives.

Under autocast a float32 weight is rounded at each use, so those that nobody trains here can be held rounded: half the
memory and the traffic, the same numbers. And a head's logits are not to be rounded at all: see mrl.algorithms.products.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from mrl.algorithms.products import NARROW, product


def narrow_matrices(model: Any, dtype: torch.dtype | None) -> None:
    """Hold in `dtype` what autocast multiplies by in `dtype` anyway, in place: numbers under autocast stay the same.

    These are the linear layers; without autocast they compute in what they are given. Embeddings, a head that is tied
    to them, norms, and experts whose matrices are one tensor stay: autocast does not round these, or not always. None =
    nothing.
    """
    if dtype is None:
        return
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for module in model.modules():
        if type(module) is nn.Linear and id(module.weight) not in embeddings:
            module.to(dtype)
            # Of a model that is copied, the copy's layer takes the place of this one.
            module.forward = functools.partial(_narrow_linear, module)  # type: ignore[method-assign]


def keep_logits_wide(causal_lm: Any) -> None:
    """Have the model's head give float32 from now on, also under autocast and where its weights are narrower.

    For good, so that it does not matter who else runs the model. A head that is more than a linear layer, or a LoRA
    adapter beside one, stays as it is.
    """
    head = causal_lm.get_output_embeddings()
    linear = getattr(head, "base_layer", head)
    if type(linear) is nn.Linear:
        linear.forward = functools.partial(_wide_linear, linear)  # type: ignore[method-assign]


def _narrow_linear(linear: nn.Linear, hidden: Tensor) -> Tensor:
    if torch.is_autocast_enabled(hidden.device.type) or hidden.dtype == linear.weight.dtype:
        return nn.functional.linear(hidden, linear.weight, linear.bias)
    bias = None if linear.bias is None else linear.bias.to(hidden.dtype)
    return nn.functional.linear(hidden, linear.weight.to(hidden.dtype), bias)


Casts = dict[int, tuple[Tensor, Tensor]]
"""A head's weights, by their identity: themselves, and what they are cast to."""

_casts: ContextVar[Casts | None] = ContextVar("casts", default=None)


@contextmanager
def same_weights(kept: Casts | None = None) -> Iterator[None]:
    """Weights do not change meanwhile: what a head's are cast to is made once. kept: casts from before, which are made
    anew in the same memory; for a module that nobody else has."""
    casts: Casts = {} if kept is None else kept
    with torch.no_grad():
        for weight, narrow in casts.values():
            narrow.copy_(weight)
    token = _casts.set(casts)
    try:
        yield
    finally:
        _casts.reset(token)


def _wide_linear(linear: nn.Linear, hidden: Tensor) -> Tensor:
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    if dtype not in NARROW:
        return _narrow_linear(linear, hidden)
    with torch.autocast(kind, enabled=False):
        product_NV: Tensor = _WideProduct.apply(hidden.flatten(0, -2).to(dtype), _cast(linear.weight, dtype))
        if linear.bias is not None:
            product_NV = product_NV + linear.bias
        return product_NV.unflatten(0, hidden.shape[:-1])


def _cast(weight: Tensor, dtype: torch.dtype) -> Tensor:
    casts = _casts.get()
    if casts is None or weight.dtype == dtype or torch.is_grad_enabled():
        return weight.to(dtype)
    if id(weight) not in casts:
        casts[id(weight)] = weight, weight.to(dtype)
    return casts[id(weight)][1]


class _WideProduct(torch.autograd.Function):
    """hidden @ weight^T in float32; the gradient goes back in the factors' dtype."""

    @staticmethod
    def forward(ctx: Any, hidden_NH: Tensor, weight_VH: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_NH, weight_VH)
        return product(hidden_NH, weight_VH.T)

    @staticmethod
    def backward(ctx: Any, grad_NV: Tensor) -> tuple[Tensor | None, Tensor | None]:
        hidden_NH, weight_VH = ctx.saved_tensors
        narrow_NV = grad_NV.to(weight_VH.dtype)
        return (
            narrow_NV @ weight_VH if ctx.needs_input_grad[0] else None,
            narrow_NV.T @ hidden_NH if ctx.needs_input_grad[1] else None,
        )
