"""Logits of bfloat16 factors: what float64 makes of the same factors, also where they are large."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from mrl.algorithms.logprobs import LowRank, token_logprobs
from mrl.algorithms.products import add_product, product, widens
from mrl.modeling.precision import keep_logits_wide, same_weights


def large_logits(tokens: int = 64, hidden: int = 96, words: int = 500) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors whose product goes up to about 40, as trained models' logits do."""
    generator = torch.Generator().manual_seed(0)
    hidden_NH = torch.randn(tokens, hidden, generator=generator)
    return hidden_NH, torch.randn(words, hidden, generator=generator)


def test_products_are_float64s() -> None:
    left, right = (x.bfloat16() for x in large_logits())
    exact = left.double() @ right.double().T
    assert exact.abs().max() > 30
    torch.testing.assert_close(product(left, right.T).double(), exact, atol=1e-4, rtol=0)
    out = torch.empty(exact.shape)
    assert product(left, right.T, out=out) is out
    add_product(out, left, right.T)
    torch.testing.assert_close(out.double(), 2 * exact, atol=1e-4, rtol=0)


def test_what_a_full_device_can_do_is_not_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would multiply in float32 from then on."""

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no memory left")

    widens.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "mm", full)
        with pytest.raises(torch.OutOfMemoryError):
            widens(torch.device("cpu"))
        patch.setattr(torch, "mm", lambda *_, **__: None)
        patch.setattr(torch, "addmm", lambda *_, **__: None)
        assert widens(torch.device("cpu")), "it is tried again"
    widens.cache_clear()


@pytest.mark.parametrize("adapted", [False, True])
def test_the_actors_logprobs_are_those_of_exact_logits(adapted: bool) -> None:
    """Rounding the logits to bfloat16 would cost a hundredth of a nat."""
    hidden_NH, weight_VH = large_logits()
    targets_N = torch.arange(len(hidden_NH))
    low = LowRank(torch.randn(len(hidden_NH), 4), torch.randn(len(weight_VH), 4)) if adapted else None
    exact_NV = hidden_NH.bfloat16().double() @ weight_VH.bfloat16().double().T
    if low is not None:
        exact_NV += low.input_NR.bfloat16().double() @ low.output_VR.bfloat16().double().T
    expected_N = torch.log_softmax(exact_NV, -1)[targets_N, targets_N]
    got_N, _ = token_logprobs(hidden_NH, weight_VH, None, targets_N, low_rank=low, compute_dtype=torch.bfloat16)
    torch.testing.assert_close(got_N.double(), expected_N, atol=1e-4, rtol=0)
    rounded_N = torch.log_softmax(exact_NV.bfloat16().double(), -1)[targets_N, targets_N]
    assert (rounded_N - expected_N).abs().mean() > 1e-2


@pytest.mark.parametrize("narrow", ["autocast", "weights"])
def test_a_models_head_gives_exact_logits(tiny_model: str, narrow: str) -> None:
    """Also after the model was copied, and its gradient is the one it had; float32 is left as it was."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model).eval()
    ids = torch.arange(9)[None]
    plain = model(input_ids=ids).logits
    keep_logits_wide(model)
    keep_logits_wide(model)
    assert torch.equal(model(input_ids=ids).logits, plain)
    copied = copy.deepcopy(model)
    copied.lm_head.weight.data.mul_(2)
    assert not torch.equal(copied(input_ids=ids).logits, plain)
    assert torch.equal(model(input_ids=ids).logits, plain)

    linear = torch.nn.Linear(96, 500, bias=True)
    model.lm_head = linear
    hidden_NH, linear.weight.data = large_logits()
    exact_NV = hidden_NH.bfloat16().double() @ linear.weight.bfloat16().double().T
    if narrow == "weights":
        linear.weight.data, hidden_NH = linear.weight.data.bfloat16(), hidden_NH.bfloat16()
    else:
        hidden_NH.requires_grad_()
    keep_logits_wide(model)
    exact_NV = exact_NV + linear.bias.double()
    with torch.autocast("cpu", torch.bfloat16, enabled=narrow == "autocast"), same_weights():
        for _ in range(2):
            with torch.no_grad():
                torch.testing.assert_close(linear(hidden_NH[None])[0].double(), exact_NV, atol=1e-4, rtol=0)
        if narrow == "autocast":
            gradients = []
            for function in (linear, lambda x: torch.nn.functional.linear(x, linear.weight, linear.bias)):
                linear.zero_grad()
                hidden_NH.grad = None
                function(hidden_NH).float().square().mean().backward()
                assert hidden_NH.grad is not None
                gradients.append([hidden_NH.grad, *(p.grad.clone() for p in linear.parameters())])
            for mine, torchs in zip(*gradients, strict=True):
                torch.testing.assert_close(mine, torchs, atol=1e-2 * float(torchs.abs().max()), rtol=2e-2)
