"""Every loss, value and gradient, against the papers' formulas written out in float64, sequence by sequence."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.algorithms import LOSSES
from mrl.algorithms.base import LossSettings, LossTerms, token_weights

MAX_LENGTH = 12
SETTINGS = LossSettings(epsilon_low=0.2, epsilon_high=0.28, sapo_temperature_pos=1.0, sapo_temperature_neg=1.05)
CISPO_SETTINGS = LossSettings(epsilon_high=1.3)


@dataclass
class Batch:
    logprobs: list[list[float]]
    old: list[list[float]]
    advantages: list[float]
    masks: list[list[int]]


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Ragged sequences, some tokens masked, ratios on both sides of the clips."""
    lengths = draw(st.lists(st.integers(1, MAX_LENGTH), min_size=1, max_size=6))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    old = [(-3 * torch.rand(n, generator=rng, dtype=torch.float64)).tolist() for n in lengths]
    logprobs = [
        [o + d for o, d in zip(row, (0.5 * torch.randn(len(row), generator=rng)).tolist(), strict=True)] for row in old
    ]
    advantages = torch.randn(len(lengths), generator=rng, dtype=torch.float64).tolist()
    masks = [(torch.rand(n, generator=rng) < 0.8).int().tolist() for n in lengths]
    return Batch(logprobs, old, advantages, masks)


def clipped(r: torch.Tensor, a: float, _logp: torch.Tensor) -> torch.Tensor:
    return -torch.min(r * a, torch.clip(r, 1 - 0.2, 1 + 0.28) * a)


def cispo(r: torch.Tensor, a: float, logp: torch.Tensor) -> torch.Tensor:
    return -min(r.item(), 1.3) * a * logp


def sapo(r: torch.Tensor, a: float, _logp: torch.Tensor) -> torch.Tensor:
    tau = 1.0 if a > 0 else 1.05
    return -(4 / tau) / (1 + torch.exp(-tau * (r - 1))) * a


def reference(name: str, batch: Batch, logprobs: list[torch.Tensor]) -> torch.Tensor:
    """The formula, token by token."""
    term = {"cispo": cispo, "sapo": sapo}.get(name, clipped)
    per_sequence = []
    for i, row in enumerate(logprobs):
        terms = [
            term(torch.exp(row[t] - batch.old[i][t]), batch.advantages[i], row[t])
            for t in range(len(row))
            if batch.masks[i][t]
        ]
        per_sequence.append(terms)
    zero = torch.zeros((), dtype=torch.float64)
    if name in ("grpo", "sapo"):
        return sum((sum(terms, zero) / len(terms) for terms in per_sequence if terms), zero) / len(per_sequence)
    total = sum((sum(terms, zero) for terms in per_sequence), zero)
    if name == "dr_grpo":
        return total / (len(per_sequence) * MAX_LENGTH)
    return total / max(sum(len(terms) for terms in per_sequence), 1)


def pad(rows: list[list[float]], dtype: torch.dtype) -> torch.Tensor:
    table = torch.full((len(rows), max(map(len, rows))), 0.0, dtype=dtype)
    for i, row in enumerate(rows):
        table[i, : len(row)] = torch.tensor(row, dtype=dtype)
    return table


def weights(normalization: str, mask_BT: torch.Tensor) -> torch.Tensor:
    tokens = int(mask_BT.sum())
    return token_weights(
        mask_BT, normalization, max_completion_length=MAX_LENGTH, num_sequences=len(mask_BT), num_tokens=tokens
    )


def ours(name: str, batch: Batch, logprobs_BT: torch.Tensor) -> torch.Tensor:
    mask_BT = pad(batch.masks, torch.float32)
    loss = LOSSES.get(name)
    terms = LossTerms(
        logprobs_BT,
        pad(batch.old, torch.float32),
        torch.tensor(batch.advantages, dtype=torch.float32)[:, None].expand_as(mask_BT),
        mask_BT,
    )
    per_token = loss.per_token(terms, CISPO_SETTINGS if name == "cispo" else SETTINGS)
    weights_BT = weights(loss.normalization, mask_BT)
    return (per_token.loss_BT * weights_BT).sum()


@pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo"])
@settings(deadline=None, max_examples=60)
@given(batch=batches())
def test_value_and_gradient_match_the_formula(name: str, batch: Batch) -> None:
    rows = [torch.tensor(row, dtype=torch.float64, requires_grad=True) for row in batch.logprobs]
    expected = reference(name, batch, rows)
    if expected.requires_grad:
        expected.backward()
    logprobs_BT = pad(batch.logprobs, torch.float32).requires_grad_()
    value = ours(name, batch, logprobs_BT)
    value.backward()
    assert value.item() == pytest.approx(expected.item(), abs=1e-5, rel=1e-5)
    for i, row in enumerate(rows):
        grad = torch.zeros_like(row) if row.grad is None else row.grad
        torch.testing.assert_close(logprobs_BT.grad[i, : len(row)].double(), grad, atol=1e-5, rtol=1e-4)
    padding = torch.ones_like(logprobs_BT)
    for i, row in enumerate(rows):
        padding[i, : len(row)] = 0
    assert (logprobs_BT.grad * padding).abs().max() == 0


def test_on_policy_gradient_is_the_advantage_times_the_score() -> None:
    """At ratio 1 every loss is the plain policy gradient: d loss / d logprob = -A x the token's weight."""
    batch = Batch([[-1.0, -2.0], [-0.5]], [[-1.0, -2.0], [-0.5]], [1.0, -2.0], [[1, 1], [1]])
    for name in LOSSES.names():
        logprobs_BT = pad(batch.logprobs, torch.float32).requires_grad_()
        ours(name, batch, logprobs_BT).backward()
        mask_BT = pad(batch.masks, torch.float32)
        weights_BT = weights(LOSSES.get(name).normalization, mask_BT)
        expected_BT = -torch.tensor([[1.0], [-2.0]]) * weights_BT
        torch.testing.assert_close(logprobs_BT.grad, expected_BT, atol=1e-6, rtol=1e-5)


def test_clipping_is_reported_where_it_takes_the_gradient_away() -> None:
    old_BT = torch.zeros(1, 4)
    logprobs_BT = torch.log(torch.tensor([[0.5, 1.5, 0.5, 1.5]])).requires_grad_()
    advantages_BT = torch.tensor([[-1.0, 1.0, 1.0, -1.0]])
    policy = LOSSES.get("grpo").per_token(LossTerms(logprobs_BT, old_BT, advantages_BT, torch.ones(1, 4)), SETTINGS)
    policy.loss_BT.sum().backward()
    assert policy.clipped_low_BT.tolist() == [[True, False, False, False]]
    assert policy.clipped_high_BT.tolist() == [[False, True, False, False]]
    clipped_BT = policy.clipped_low_BT | policy.clipped_high_BT
    assert (logprobs_BT.grad == 0).tolist() == clipped_BT.tolist()


def test_sequences_left_out_for_their_length_count_in_the_mean() -> None:
    mask_BT = torch.ones(2, 3)
    counts = {"max_completion_length": 5, "num_sequences": 4, "num_tokens": 8}
    assert token_weights(mask_BT, "sequences", **counts).sum() == pytest.approx(0.5)
    assert token_weights(mask_BT, "max_length", **counts).sum() == pytest.approx(6 / 20)
    assert token_weights(mask_BT, "tokens", **counts).sum() == pytest.approx(6 / 8)


def test_a_batch_without_trainable_tokens_weighs_nothing() -> None:
    for normalization in ("sequences", "tokens", "max_length"):
        weights_BT = weights(normalization, torch.zeros(2, 3))
        assert math.isfinite(weights_BT.sum())
        assert weights_BT.abs().max() == 0
