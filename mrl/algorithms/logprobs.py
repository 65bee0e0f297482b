"""Log-probabilities of given tokens, from hidden states and the output head, without the logits of a whole batch.

Full logits cost B×T×V floats (16×512 tokens at 151,936 words: 5 GB, three times over in the backward pass). Here they
exist for `chunk` tokens at a time, and are computed again in the backward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 1024
"""Tokens whose logits exist at once. 256 takes a third of the memory and a tenth more time."""


def token_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    temperature: float = 1.0,
    *,
    compute_dtype: torch.dtype | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """log softmax(logits / temperature) at each target, and the entropy of that distribution in nats; N float32 each.

    logits = hidden @ weight^T + bias, multiplied in `compute_dtype` (default: the weight's), the softmax in float32.
    Differentiable in hidden, weight and bias; the entropy carries no gradient.
    """
    dtype = compute_dtype or weight_VH.dtype
    with torch.autocast(hidden_NH.device.type, enabled=False):
        return _ChunkedLogprobs.apply(hidden_NH, weight_VH, bias_V, targets_N, temperature, dtype, chunk)


def logprobs_from_logits(
    logits_NV: Tensor, targets_N: Tensor, temperature: float = 1.0, *, entropy_grad: bool = False
) -> tuple[Tensor, Tensor]:
    """The same from logits that exist already; the logprobs' gradient flows into them, and with `entropy_grad` the
    entropy's."""
    log_p_NV = torch.log_softmax(logits_NV.float() / temperature, dim=-1)
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        entropy_N = -(log_p_NV.exp() * log_p_NV).sum(dim=-1)
    return log_p_NV.gather(-1, targets_N[:, None]).squeeze(-1), entropy_N


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_NH, weight_VH, bias_V, targets_N, temperature, dtype, chunk):  # type: ignore[no-untyped-def]
        weight = weight_VH.to(dtype)
        logprobs_N = torch.empty(len(targets_N), dtype=torch.float32, device=hidden_NH.device)
        entropy_N, log_z_N = torch.empty_like(logprobs_N), torch.empty_like(logprobs_N)
        for rows in _slices(len(targets_N), chunk):
            logits_CV = _logits(hidden_NH[rows], weight, bias_V, temperature)
            log_z_C = torch.logsumexp(logits_CV, dim=-1)
            logprobs_N[rows] = logits_CV.gather(-1, targets_N[rows, None]).squeeze(-1) - log_z_C
            log_z_N[rows] = log_z_C
            p_CV = (logits_CV - log_z_C[:, None]).exp_()
            entropy_N[rows] = log_z_C - p_CV.mul_(logits_CV).sum(dim=-1)
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N, log_z_N)
        ctx.temperature, ctx.dtype, ctx.chunk = temperature, dtype, chunk
        ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx, grad_N, _grad_entropy):  # type: ignore[no-untyped-def]
        hidden_NH, weight_VH, bias_V, targets_N, log_z_N = ctx.saved_tensors
        weight = weight_VH.to(ctx.dtype)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden_NH = torch.empty_like(hidden_NH) if needs_hidden else None
        grad_weight_VH = torch.zeros_like(weight_VH) if needs_weight else None
        grad_bias_V = torch.zeros_like(bias_V) if needs_bias else None
        for rows in _slices(len(targets_N), ctx.chunk):
            # d logprob / d logit = (onehot - p) / temperature
            grad_CV = (_logits(hidden_NH[rows], weight, bias_V, ctx.temperature) - log_z_N[rows, None]).exp_().neg_()
            grad_CV[torch.arange(len(grad_CV), device=grad_CV.device), targets_N[rows]] += 1
            grad_CV *= (grad_N[rows] / ctx.temperature)[:, None]
            if grad_bias_V is not None:
                grad_bias_V += grad_CV.sum(dim=0)
            grad_CV = grad_CV.to(ctx.dtype)
            if grad_hidden_NH is not None:
                grad_hidden_NH[rows] = (grad_CV @ weight).to(hidden_NH.dtype)
            if grad_weight_VH is not None:
                grad_weight_VH += grad_CV.T @ hidden_NH[rows].to(ctx.dtype)
        return grad_hidden_NH, grad_weight_VH, grad_bias_V, None, None, None, None


def _logits(hidden_CH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, temperature: float) -> Tensor:
    logits_CV = (hidden_CH.to(weight_VH.dtype) @ weight_VH.T).float()
    if bias_V is not None:
        logits_CV += bias_V.float()
    return logits_CV if temperature == 1.0 else logits_CV / temperature


def _slices(count: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, count)) for start in range(0, count, chunk)]
