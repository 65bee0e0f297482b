"""The precision in which linear layers are stored, and of the head's logits.

Autocast rounds a float32 weight at each use, so weights that are not trained can be stored rounded: half the memory and
traffic, the same numbers. Logits must not be rounded at all: see mrl.algorithms.products.
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
    """Store linear layers in `dtype`, in place; results under autocast to `dtype` do not change. None = do nothing.

    Without autocast they compute in their input's dtype. Embeddings, a head tied to them, norms, and experts stored in
    one tensor keep their dtype: autocast does not always round these.
    """
    if dtype is None:
        return
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for module in model.modules():
        if type(module) is nn.Linear and id(module.weight) not in embeddings:
            module.to(dtype)
            follow_input(module)


def follow_input(linear: nn.Linear) -> None:
    """Make a linear layer whose weights may be narrower than its input compute in the input's dtype without
    autocast."""
    # deepcopy of the model rebinds the partial to the copy's layer.
    linear.forward = functools.partial(_narrow_linear, linear)  # type: ignore[method-assign]


def keep_logits_wide(causal_lm: Any) -> None:
    """Make the model's head return float32, also under autocast and with narrower weights.

    The change is permanent, so it does not matter who else runs the model. A head that is neither a linear layer nor
    one with a LoRA adapter is left as it is.
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
"""By id of a head's weight: the weight and its cast."""

_casts: ContextVar[Casts | None] = ContextVar("casts", default=None)


@contextmanager
def same_weights(kept: Casts | None = None) -> Iterator[None]:
    """Weights do not change inside, so a head's weight is cast once. kept: earlier casts, which are refreshed in place;
    only for a module that nobody else uses."""
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
