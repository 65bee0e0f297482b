"""Chunked log-probabilities against the plain formula in float64, value and gradient."""

from __future__ import annotations

import pytest
import torch

from mrl.algorithms.kl import kl_k3
from mrl.algorithms.logprobs import logprobs_from_logits, token_logprobs
from mrl.algorithms.mismatch import importance_weights


def inputs(dtype: torch.dtype = torch.float32, n: int = 13, h: int = 8, v: int = 29) -> tuple[torch.Tensor, ...]:
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, h, generator=rng).to(dtype).requires_grad_()
    weight = torch.randn(v, h, generator=rng).to(dtype).requires_grad_()
    bias = torch.randn(v, generator=rng).to(dtype).requires_grad_()
    return hidden, weight, bias, torch.randint(0, v, (n,), generator=rng), torch.randn(n, generator=rng)


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [1, 5, 13, 100])
def test_matches_float64(chunk: int, temperature: float, with_bias: bool) -> None:
    hidden, weight, bias, targets, upstream = inputs()
    got, entropy = token_logprobs(hidden, weight, bias if with_bias else None, targets, temperature, chunk=chunk)
    (got * upstream).sum().backward()

    h64, w64, b64 = (x.detach().double().requires_grad_() for x in (hidden, weight, bias))
    log_p = torch.log_softmax((h64 @ w64.T + (b64 if with_bias else 0)) / temperature, dim=-1)
    expected = log_p.gather(1, targets[:, None]).squeeze(1)
    (expected * upstream.double()).sum().backward()

    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy.double(), -(log_p.exp() * log_p).sum(-1), atol=5e-5, rtol=1e-4)
    torch.testing.assert_close(hidden.grad.double(), h64.grad, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(weight.grad.double(), w64.grad, atol=1e-5, rtol=1e-4)
    if with_bias:
        torch.testing.assert_close(bias.grad.double(), b64.grad, atol=1e-5, rtol=1e-4)


def test_the_path_over_existing_logits_agrees() -> None:
    hidden, weight, bias, targets, _ = inputs()
    direct = token_logprobs(hidden, weight, bias, targets, 0.8)
    through_logits = logprobs_from_logits(hidden @ weight.T + bias, targets, 0.8)
    for a, b in zip(direct, through_logits, strict=True):
        torch.testing.assert_close(a, b, atol=5e-5, rtol=1e-4)


def test_bfloat16_compute_stays_close_and_frozen_weights_get_no_gradient() -> None:
    hidden, weight, _, targets, upstream = inputs()
    weight.requires_grad_(False)
    got, _ = token_logprobs(hidden, weight, None, targets, compute_dtype=torch.bfloat16)
    (got * upstream).sum().backward()
    expected, _ = token_logprobs(hidden.detach(), weight, None, targets)
    torch.testing.assert_close(got, expected, atol=0.1, rtol=0.02)
    assert weight.grad is None
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.float32


def test_memory_does_not_hold_the_logits_of_the_whole_batch() -> None:
    """The largest tensor saved for the backward pass is far smaller than N x V."""
    hidden, weight, _, targets, _ = inputs(n=512, h=8, v=4096)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (sizes.append(t.numel()), t)[1], lambda t: t):
        token_logprobs(hidden, weight, None, targets, chunk=64)
    assert max(sizes) <= weight.numel()


def test_k3_is_zero_on_equal_policies_and_estimates_the_divergence() -> None:
    rng = torch.Generator().manual_seed(1)
    p = torch.log_softmax(torch.randn(6, generator=rng), -1)
    q = torch.log_softmax(torch.randn(6, generator=rng), -1)
    assert kl_k3(p, p).abs().max() == 0
    assert (kl_k3(p, q) >= 0).all()
    exact = (p.exp() * (p - q)).sum()
    torch.testing.assert_close((p.exp() * kl_k3(p, q)).sum(), exact)  # unbiased: its mean under p is the divergence


def test_importance_weights() -> None:
    old = torch.log(torch.tensor([[0.5, 0.9, 0.2, 0.1]]))
    sampler = torch.log(torch.tensor([[0.25, 0.9, 0.05, 0.4]]))
    mask = torch.tensor([[1, 1, 1, 0]])
    for correction, expected in (
        ("none", [1.0, 1.0, 1.0, 1.0]),
        ("truncated", [2.0, 1.0, 3.0, 1.0]),
        ("masked", [2.0, 1.0, 0.0, 1.0]),
    ):
        got = importance_weights(old, sampler, mask, correction, cap=3.0)
        torch.testing.assert_close(got, torch.tensor([expected]), atol=1e-5, rtol=1e-5)
