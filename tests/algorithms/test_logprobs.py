"""Tiled log-probabilities against the plain formula in float64, value and gradient."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from mrl.algorithms.kl import kl_k3
from mrl.algorithms.logprobs import LogitTransform, LowRank, logprobs_from_logits, token_logprobs
from tests.soak import slow_but


def inputs(dtype: torch.dtype = torch.float32, n: int = 13, h: int = 8, v: int = 29) -> tuple[torch.Tensor, ...]:
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, h, generator=rng).to(dtype).requires_grad_()
    weight = torch.randn(v, h, generator=rng).to(dtype).requires_grad_()
    bias = torch.randn(v, generator=rng).to(dtype).requires_grad_()
    return hidden, weight, bias, torch.randint(0, v, (n,), generator=rng), torch.randn(n, generator=rng)


def plain(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    temperature: float,
    transform: LogitTransform,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The formula, all logits at once."""
    logits = hidden @ weight.T + (0 if bias is None else bias)
    log_p = torch.log_softmax(transform(logits) / temperature, dim=-1)
    return log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


TRANSFORMS = [LogitTransform(), LogitTransform(scale=0.25), LogitTransform(softcap=3.0), LogitTransform(2.0, 5.0)]


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("temperature", slow_but([0.7], [1.0, 0.7]))
@pytest.mark.parametrize("tile", slow_but([(5, 7)], [(1, 1), (5, 7), (13, 29), (100, 100)]))
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("entropy_grad", [False, True])
def test_value_and_gradient_match_float64(
    tile: tuple[int, int], temperature: float, with_bias: bool, transform: LogitTransform, entropy_grad: bool
) -> None:
    hidden, weight, bias, targets, upstream = inputs()
    given = bias if with_bias else None
    got, entropy = token_logprobs(
        hidden, weight, given, targets, temperature, transform=transform, entropy_grad=entropy_grad, tile=tile
    )
    loss = (got * upstream).sum()
    (loss + (entropy * upstream.flip(0)).sum() if entropy_grad else loss).backward()
    assert entropy.requires_grad == entropy_grad

    h64, w64, b64 = (x.detach().double().requires_grad_() for x in (hidden, weight, bias))
    expected, expected_entropy = plain(h64, w64, b64 if with_bias else None, targets, temperature, transform)
    loss = (expected * upstream.double()).sum()
    (loss + (expected_entropy * upstream.flip(0).double()).sum() if entropy_grad else loss).backward()

    torch.testing.assert_close(got.double(), expected, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(entropy.double(), expected_entropy, atol=5e-5, rtol=1e-4)
    for mine, theirs in ((hidden, h64), (weight, w64), *([(bias, b64)] if with_bias else [])):
        torch.testing.assert_close(mine.grad.double(), theirs.grad, atol=2e-4, rtol=1e-3)


@given(
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 9), st.integers(2, 60)),
    tile=st.tuples(st.integers(1, 50), st.integers(1, 70)),
    seed=st.integers(0, 2**16),
    spread=st.sampled_from([0.1, 1.0, 30.0]),
    idle=st.floats(0, 1),
)
@settings(max_examples=40, deadline=None)
def test_any_sizes_in_float64_are_exact(
    sizes: tuple[int, int, int], tile: tuple[int, int], seed: int, spread: float, idle: float
) -> None:
    """Whatever the tiles, however far apart the logits, and whichever tokens have no gradient."""
    n, h, v = sizes
    rng = torch.Generator().manual_seed(seed)
    hidden = (torch.randn(n, h, generator=rng, dtype=torch.float64) * spread).requires_grad_()
    weight = torch.randn(v, h, generator=rng, dtype=torch.float64).requires_grad_()
    targets = torch.randint(0, v, (n,), generator=rng)
    upstream = torch.randn(n, generator=rng, dtype=torch.float64) * (torch.rand(n, generator=rng) >= idle)
    got = token_logprobs(hidden, weight, None, targets, 0.8, tile=tile)
    expected = plain(hidden, weight, None, targets, 0.8, LogitTransform())
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-9, rtol=1e-9)
    mine_grads = torch.autograd.grad((got[0] * upstream).sum(), (hidden, weight))
    their_grads = torch.autograd.grad((expected[0] * upstream).sum(), (hidden, weight))
    for mine, theirs in zip(mine_grads, their_grads, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_gradient_check(entropy_grad: bool) -> None:
    """Against finite differences, the low-rank update and the soft cap included."""
    hidden, weight, bias, targets, _ = inputs(torch.float64, n=5, h=4, v=7)
    low_in, low_out = torch.randn(5, 2).double().requires_grad_(), torch.randn(7, 2).double().requires_grad_()

    def function(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h, w, b, low_in, low_out = args
        both = token_logprobs(
            h,
            w,
            b,
            targets,
            0.9,
            low_rank=LowRank(low_in, low_out),
            transform=LogitTransform(1.5, 4.0),
            entropy_grad=entropy_grad,
            tile=(2, 3),
        )
        return both if entropy_grad else both[:1]

    assert torch.autograd.gradcheck(function, (hidden, weight, bias, low_in, low_out))


def test_a_low_rank_update_is_the_merged_head() -> None:
    hidden, weight, _, targets, upstream = inputs()
    weight.requires_grad_(False)
    a, b = torch.randn(3, 8).requires_grad_(), torch.randn(29, 3).requires_grad_()
    got, _ = token_logprobs(hidden, weight, None, targets, low_rank=LowRank(hidden @ a.T * 0.5, b), tile=(5, 7))
    mine = torch.autograd.grad((got * upstream).sum(), (hidden, a, b))
    expected, _ = plain(hidden, weight + 0.5 * b @ a, None, targets, 1.0, LogitTransform())
    theirs = torch.autograd.grad((expected * upstream).sum(), (hidden, a, b))
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)


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


def test_bfloat16_weights_get_gradients_summed_in_float32() -> None:
    hidden, weight, _, targets, _ = inputs(n=400)
    exact = torch.autograd.grad((token_logprobs(hidden, weight, None, targets)[0] * torch.ones(400)).sum(), weight)[0]
    h16, w16 = (t.detach().bfloat16().requires_grad_() for t in (hidden, weight))
    got, _ = token_logprobs(h16, w16, None, targets, tile=(8, 16))
    got.sum().backward()
    assert (h16.grad.dtype, w16.grad.dtype, got.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    assert torch.nn.functional.cosine_similarity(w16.grad.float().flatten(), exact.flatten(), dim=0) > 0.999


def test_entropy_is_not_computed_where_it_is_not_asked_for() -> None:
    hidden, weight, _, targets, _ = inputs()
    logprobs, entropy = token_logprobs(hidden, weight, None, targets, entropy=False)
    torch.testing.assert_close(logprobs, token_logprobs(hidden, weight, None, targets)[0])
    assert entropy.abs().max() == 0


def test_memory_does_not_hold_the_logits_of_the_whole_batch() -> None:
    """No tensor made on the way, forward or backward, is larger than the head or a tile."""
    hidden, weight, _, targets, upstream = inputs(n=512, h=8, v=4096)
    sizes: list[int] = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            sizes.extend(t.numel() for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor))
            return out

    with Sizes():
        logprobs, _ = token_logprobs(hidden, weight, None, targets, tile=(64, 512))
        (logprobs * upstream).sum().backward()
    assert max(sizes) <= weight.numel() < 512 * 4096 / 10


def test_k3_is_zero_on_equal_policies_and_estimates_the_divergence() -> None:
    rng = torch.Generator().manual_seed(1)
    p = torch.log_softmax(torch.randn(6, generator=rng), -1)
    q = torch.log_softmax(torch.randn(6, generator=rng), -1)
    assert kl_k3(p, p).abs().max() == 0
    assert (kl_k3(p, q) >= 0).all()
    exact = (p.exp() * (p - q)).sum()
    torch.testing.assert_close((p.exp() * kl_k3(p, q)).sum(), exact)  # unbiased: its mean under p is the divergence
