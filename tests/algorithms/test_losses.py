"""Every loss, value and gradient, against the papers' formulas written out in float64, sequence by sequence."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mrl.actor.objective import Objective
from mrl.actor.step_metrics import StepMetrics
from mrl.algorithms import LOSSES
from mrl.algorithms.base import LossSettings, LossTerms, token_weights
from mrl.config import AlgorithmConfig
from mrl.errors import ConfigError
from mrl.types import TrainBatch

MAX_LENGTH = 12
CLIP = {"epsilon": 0.2, "epsilon_high": 0.28}
OF_LOSS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("grpo", "dapo", "dr_grpo", "bnpo", "gspo", "luspo"), CLIP),
    "cispo": {"epsilon_high": 1.3},
    "vespo": {"vespo_k_pos": 1.5},
}
NAMES = LOSSES.names()


@dataclass
class Batch:
    logprobs: list[list[float]]
    old: list[list[float]]
    sampler: list[list[float]]
    ref: list[list[float]]
    entropy: list[list[float]]
    advantages: list[list[float]]
    masks: list[list[int]]

    @property
    def lengths(self) -> list[int]:
        return [len(row) for row in self.logprobs]


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Ragged sequences, some tokens masked, ratios on both sides of the clips; advantages by sequence or by token."""
    lengths = draw(st.lists(st.integers(1, MAX_LENGTH), min_size=1, max_size=6))
    by_token = draw(st.booleans())
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def near(rows: list[list[float]], spread: float) -> list[list[float]]:
        noise = [(spread * torch.randn(len(row), generator=rng)).tolist() for row in rows]
        return [[value + d for value, d in zip(row, own, strict=True)] for row, own in zip(rows, noise, strict=True)]

    old = [(-3 * torch.rand(n, generator=rng, dtype=torch.float64)).tolist() for n in lengths]
    advantages = [torch.randn(n, generator=rng, dtype=torch.float64).tolist() for n in lengths]
    if not by_token:
        advantages = [[row[0]] * len(row) for row in advantages]
    entropy = [torch.rand(n, generator=rng).tolist() for n in lengths]
    masks = [(torch.rand(n, generator=rng) < 0.8).int().tolist() for n in lengths]
    return Batch(near(old, 0.5), old, near(old, 0.3), near(old, 0.3), entropy, advantages, masks)


# --- the formulas, one token at a time --------------------------------------------------------------------------------


def clip(value: Tensor, low: float, high: float) -> Tensor:
    return torch.clip(value, low, high)


def reference(config: AlgorithmConfig, batch: Batch, logprobs: list[Tensor], entropy: list[Tensor]) -> Tensor:
    """The loss of a batch as docs/algorithms.md has it: plain loops over tokens in float64."""
    zero = torch.zeros((), dtype=torch.float64)
    kept = kept_tokens(config, batch)
    sums, counts = [], []
    for i, row in enumerate(logprobs):
        on = [t for t in range(len(row)) if batch.masks[i][t]]
        log_ratio = [row[t] - batch.old[i][t] for t in on]
        mean = sum(log_ratio, zero) / max(len(on), 1)
        total = zero
        for place, t in enumerate(on):
            level = config.importance_sampling_level or (
                "sequence" if config.loss_type in ("gspo", "luspo") else "token"
            )
            ratio = torch.exp(mean if level == "sequence" else log_ratio[place])
            weight = correction(config, batch, i, t)
            if config.loss_type == "vespo":
                log_w = sum(r.item() for r in log_ratio) + sum(
                    max(math.log(max(correction(config, batch, i, u), 1e-30)), math.log(1e-8)) for u in on
                )
                term = vespo_term(config, batch.advantages[i][t], min(max(log_w, math.log(1e-8)), 20.0), row[t])
            else:
                term = weight * policy_term(config, ratio, batch.advantages[i][t], row[t])
            total = total + (term if (i, t) in kept else zero)
            if config.beta:
                d = batch.ref[i][t] - row[t]
                kl = {"k1": -d, "k2": d**2 / 2, "k3": torch.exp(d) - 1 - d}[config.kl_estimator or "k3"]
                total = total + config.beta * (ratio * kl if config.use_bias_correction_kl else kl)
        sums.append(total)
        counts.append(len(on))
    loss = joined(config.loss_type, sums, counts)
    if config.entropy_coef:
        loss = loss - config.entropy_coef * sum((entropy[i][t] for i, t in kept), zero) / max(len(kept), 1)
    return loss


def joined(name: str, sums: list[Tensor], counts: list[int]) -> Tensor:
    zero = torch.zeros((), dtype=torch.float64)
    if name in ("grpo", "sapo", "gspo"):
        return sum((s / n for s, n in zip(sums, counts, strict=True) if n), zero) / len(sums)
    total = sum(sums, zero)
    if name == "dr_grpo":
        return total / (len(sums) * MAX_LENGTH)
    return total / (len(sums) if name in ("luspo", "reinforce") else max(sum(counts), 1))


def policy_term(config: AlgorithmConfig, r: Tensor, a: float, logp: Tensor) -> Tensor:
    if config.loss_type == "reinforce":
        return -a * logp
    if config.loss_type == "cispo":
        return -min(r.item(), 1.3) * a * logp
    if config.loss_type == "sapo":
        tau = 1.0 if a > 0 else 1.05
        return -(4 / tau) / (1 + torch.exp(-tau * (r - 1))) * a
    surrogate = torch.min(r * a, clip(r, 1 - 0.2, 1 + 0.28) * a)
    if config.delta is not None and a < 0:
        surrogate = torch.max(surrogate, torch.tensor(config.delta * a, dtype=torch.float64))
    return -surrogate


def vespo_term(config: AlgorithmConfig, a: float, log_w: float, logp: Tensor) -> Tensor:
    k, lam = (config.vespo_k_pos, config.vespo_lambda_pos) if a >= 0 else (config.vespo_k_neg, config.vespo_lambda_neg)
    w = math.exp(log_w)
    return -(w**k) * math.exp(lam * (1 - w)) * a * logp


def correction(config: AlgorithmConfig, batch: Batch, i: int, t: int) -> float:
    mode = config.importance_sampling
    if mode == "none":
        return 1.0
    places = [u for u, on in enumerate(batch.masks[i]) if on] if mode.startswith("sequence") else [t]
    w = math.exp(sum(batch.old[i][u] - batch.sampler[i][u] for u in places))
    low, high = config.importance_sampling_floor or 0.0, config.importance_sampling_cap or math.inf
    if mode.endswith("truncated"):
        return min(max(w, low), high)
    return w if low <= w <= high else 0.0


def kept_tokens(config: AlgorithmConfig, batch: Batch) -> set[tuple[int, int]]:
    on = [(i, t) for i, row in enumerate(batch.masks) for t, m in enumerate(row) if m]
    if config.top_entropy_quantile == 1 or not on:
        return set(on)
    entropies = torch.tensor([batch.entropy[i][t] for i, t in on])
    threshold = torch.quantile(entropies, 1 - config.top_entropy_quantile)
    return {place for place, value in zip(on, entropies, strict=True) if value >= threshold}


# --- ours -------------------------------------------------------------------------------------------------------------


def pad(rows: list[list[float]], dtype: torch.dtype = torch.float32, beyond: int = 0, fill: float = 0.0) -> Tensor:
    table = torch.full((len(rows), max(map(len, rows)) + beyond), fill, dtype=dtype)
    for i, row in enumerate(rows):
        table[i, : len(row)] = torch.tensor(row, dtype=dtype)
    return table


def ours(
    token_batch_of: Callable[..., Any],
    config: AlgorithmConfig,
    batch: Batch,
    *,
    parts: int = 1,
    beyond: int = 0,
    fill: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, dict[str, float]]:
    """The loss, its gradients to logprobs and entropies, and metrics, in `parts` micro-batches, with more padding."""
    mask_BT = pad(batch.masks, beyond=beyond)
    tables = [pad(rows, beyond=beyond, fill=fill) for rows in (batch.advantages, batch.sampler, batch.old, batch.ref)]
    logprobs_BT = pad(batch.logprobs, beyond=beyond, fill=fill).requires_grad_()
    entropy_BT = pad(batch.entropy, beyond=beyond, fill=fill).requires_grad_()
    tokens = token_batch_of(batch.lengths, mask_BT, *tables)
    objective, metrics = Objective(config, num_iterations=2), StepMetrics()
    objective.prepare(tokens, TrainBatch([], [], len(batch.masks), int(mask_BT.sum())), entropy_BT.detach())
    total = torch.zeros(())
    for start in range(min(parts, len(batch.masks))):
        index = list(range(start, len(batch.masks), parts))
        part = tokens.take(index)
        place = (torch.tensor(index), slice(part.mask_BT.shape[1]))
        loss = objective.part_loss(part, logprobs_BT[place], entropy_BT[place], metrics)
        loss.backward()
        total = total + loss.detach()
    metrics.update(total, torch.zeros(()))
    grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in (logprobs_BT, entropy_BT)]
    return total, grads[0], grads[1], metrics.summary()


def configured(name: str, **options: Any) -> AlgorithmConfig:
    defaults = {"importance_sampling": "none", "max_completion_length": MAX_LENGTH}
    return AlgorithmConfig(loss_type=name, **(defaults | OF_LOSS.get(name, {}) | options))


@st.composite
def configurations(draw: st.DrawFn, name: str) -> AlgorithmConfig:
    """Everything that may stand around a loss; what is refused is not drawn."""
    options: dict[str, Any] = {}
    if draw(st.booleans()):
        options |= {"beta": 0.1, "kl_estimator": draw(st.sampled_from(["k1", "k2", "k3"]))}
        options["use_bias_correction_kl"] = draw(st.booleans())
    mode = draw(st.sampled_from(["none", "truncated", "masked", "sequence_truncated", "sequence_masked"]))
    if mode != "none":
        floor = draw(st.sampled_from([None, 0.7]))
        options |= {"importance_sampling": mode, "importance_sampling_cap": 1.2, "importance_sampling_floor": floor}
    if draw(st.booleans()):
        options["top_entropy_quantile"] = draw(st.sampled_from([0.0, 0.2, 0.77]))
    if draw(st.booleans()):
        options["entropy_coef"] = draw(st.sampled_from([0.01, -0.01]))
    levels = LOSSES.get(name).levels
    if len(levels) > 1:
        options["importance_sampling_level"] = draw(st.sampled_from(levels))
    if "delta" in LOSSES.get(name).options and draw(st.booleans()):
        options["delta"] = 1.4
    try:
        return configured(name, **options)
    except ConfigError:
        return configured(name)


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=20)
@given(data=st.data(), batch=batches())
def test_value_and_gradient_match_the_formula(
    token_batch_of: Callable[..., Any], name: str, data: st.DataObject, batch: Batch
) -> None:
    config = data.draw(configurations(name))
    logprobs, entropy = (
        [torch.tensor(row, dtype=torch.float64, requires_grad=True) for row in rows]
        for rows in (batch.logprobs, batch.entropy)
    )
    expected = reference(config, batch, logprobs, entropy)
    if expected.requires_grad:
        expected.backward()
    value, grad_BT, grad_entropy_BT, _ = ours(token_batch_of, config, batch)
    assert value.item() == pytest.approx(expected.item(), abs=1e-5, rel=1e-5)
    for leaves, got_BT in ((logprobs, grad_BT), (entropy, grad_entropy_BT)):
        grads = [torch.zeros_like(row) if row.grad is None else row.grad for row in leaves]
        torch.testing.assert_close(
            got_BT.double(), pad([g.tolist() for g in grads], torch.float64), atol=1e-5, rtol=1e-4
        )


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=10)
@given(data=st.data(), batch=batches(), parts=st.integers(2, 7))
def test_neither_the_split_nor_the_padding_changes_anything(
    token_batch_of: Callable[..., Any], name: str, data: st.DataObject, batch: Batch, parts: int
) -> None:
    """What the padding holds is not looked at."""
    config = data.draw(configurations(name))
    value, grad_BT, grad_entropy_BT, metrics = ours(token_batch_of, config, batch)
    width = grad_BT.shape[1]
    for changes in ({"parts": parts}, {"beyond": 3}, {"parts": parts, "beyond": 2, "fill": 50.0}):
        other, other_BT, other_entropy_BT, others = ours(token_batch_of, config, batch, **changes)
        torch.testing.assert_close(other, value, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(other_BT[:, :width], grad_BT, atol=1e-7, rtol=1e-5)
        torch.testing.assert_close(other_entropy_BT[:, :width], grad_entropy_BT, atol=1e-7, rtol=1e-5)
        assert other_BT[:, width:].abs().sum() == 0
        for metric in metrics:
            assert others[metric] == pytest.approx(metrics[metric], abs=1e-5, rel=1e-5), metric


@pytest.mark.parametrize("name", NAMES)
def test_what_is_masked_may_be_not_a_number(token_batch_of: Callable[..., Any], name: str) -> None:
    """The sampler's logprobs of tokens that the environment put there are not looked at."""
    old = [[-1.0, -2.0, -0.5], [-0.5]]
    batch = Batch([[-1.1, -2.0, -0.3], [-0.6]], old, old, old, old, [[1.0] * 3, [-2.0]], [[1, 0, 1], [1]])
    config = configured(name, importance_sampling="truncated")
    value, grad_BT, _, _ = ours(token_batch_of, config, batch)
    batch.sampler = [[-1.0, float("nan"), -0.5], [-0.5]]
    poisoned, poisoned_BT, _, _ = ours(token_batch_of, config, batch)
    assert torch.equal(value, poisoned)
    assert torch.equal(grad_BT, poisoned_BT)


def test_on_policy_gradient_is_the_advantage_times_the_score(token_batch_of: Callable[..., Any]) -> None:
    """At ratio 1 every loss is the plain policy gradient: d loss / d logprob = -A x the token's weight."""
    rows = [[-1.0, -2.0], [-0.5]]
    batch = Batch(rows, rows, rows, rows, rows, [[1.0] * 2, [-2.0]], [[1, 1], [1]])
    for name in NAMES:
        _, grad_BT, _, _ = ours(token_batch_of, configured(name), batch)
        weights_BT = weights(LOSSES.get(name).normalization, pad(batch.masks))
        expected_BT = -torch.tensor([[1.0], [-2.0]]) * weights_BT
        torch.testing.assert_close(grad_BT, expected_BT, atol=1e-6, rtol=1e-5)


def weights(normalization: Any, mask_BT: Tensor) -> Tensor:
    tokens = int(mask_BT.sum())
    return token_weights(
        mask_BT, normalization, max_completion_length=MAX_LENGTH, num_sequences=len(mask_BT), num_tokens=tokens
    )


def test_clipping_is_reported_where_it_takes_the_gradient_away() -> None:
    old_BT = torch.zeros(1, 5)
    logprobs_BT = torch.log(torch.tensor([[0.5, 1.5, 0.5, 1.5, 3.0]])).requires_grad_()
    advantages_BT = torch.tensor([[-1.0, 1.0, 1.0, -1.0, -1.0]])
    terms = LossTerms(logprobs_BT, old_BT, advantages_BT, torch.ones(1, 5))
    policy = LOSSES.get("grpo").per_token(terms, LossSettings(0.2, 0.28, delta=2.0))
    policy.loss_BT.sum().backward()
    assert policy.clipped_low_BT.tolist() == [[True, False, False, False, False]]
    assert policy.clipped_high_BT.tolist() == [[False, True, False, False, True]]
    clipped_BT = policy.clipped_low_BT | policy.clipped_high_BT
    assert (logprobs_BT.grad == 0).tolist() == clipped_BT.tolist()


def test_sequences_left_out_for_their_length_count_in_the_mean() -> None:
    mask_BT = torch.ones(2, 3)
    counts = {"max_completion_length": 5, "num_sequences": 4, "num_tokens": 8}
    assert token_weights(mask_BT, "sequences", **counts).sum() == pytest.approx(0.5)
    assert token_weights(mask_BT, "max_length", **counts).sum() == pytest.approx(6 / 20)
    assert token_weights(mask_BT, "tokens", **counts).sum() == pytest.approx(6 / 8)
    assert token_weights(mask_BT, "sequence_sums", **counts).sum() == pytest.approx(6 / 4)


def test_a_batch_without_trainable_tokens_weighs_nothing() -> None:
    for normalization in ("sequences", "tokens", "max_length", "sequence_sums"):
        weights_BT = weights(normalization, torch.zeros(2, 3))
        assert math.isfinite(weights_BT.sum())
        assert weights_BT.abs().max() == 0
