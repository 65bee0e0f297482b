"""A model's own head made to give float32 logits from narrower factors: see mrl.algorithms.products."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from mrl.algorithms.products import NARROW, product


def keep_logits_wide(causal_lm: Any) -> None:
    """Have the model's head give float32 from now on, also under autocast and where its weights are narrower.

    For good, so that it does not matter who else runs the model. A head that is more than a linear layer, or a LoRA
    adapter beside one, stays as it is.
    """
    head = causal_lm.get_output_embeddings()
    linear = getattr(head, "base_layer", head)
    if type(linear) is nn.Linear and "forward" not in vars(linear):
        # Of a model that is copied, the copy's layer takes the place of this one.
        linear.forward = functools.partial(_wide_linear, linear)  # type: ignore[method-assign]


_casts: ContextVar[dict[int, Tensor] | None] = ContextVar("casts", default=None)


@contextmanager
def same_weights() -> Iterator[None]:
    """Weights do not change meanwhile: what a head's are cast to is made once."""
    token = _casts.set({})
    try:
        yield
    finally:
        _casts.reset(token)


def _wide_linear(linear: nn.Linear, hidden: Tensor) -> Tensor:
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else linear.weight.dtype
    if dtype not in NARROW:
        return nn.functional.linear(hidden, linear.weight, linear.bias)
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
        casts[id(weight)] = weight.to(dtype)
    return casts[id(weight)]


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
