"""Sampling: per-row filters, counter-based random numbers and an inverse-CDF draw. Pure functions on tensors.

A row's draw depends only on its own logits, parameters, seed and position, so a request's tokens do not depend on the
rest of the batch (up to the last bits of the logits, which may be rounded differently at another batch size).

Filters follow vLLM's sampler in order and meaning: temperature, min-p, top-k, top-p. Top-k keeps all tokens at least as
likely as the k-th. Top-p renormalises the rest and keeps each token whose more likely ones sum to less than p.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.system.transfers import to_device
from mrl.types import SamplingParams

_CHUNK = 128
"""Tokens per chunk of the two-level draw."""

_MAX_DRAW_ELEMENTS = 1 << 25
"""Rows are sampled in slices of at most this many logits: about five temporaries of that size exist at once."""


@dataclass(frozen=True, slots=True)
class RowParams:
    """Sampling parameters of B rows, as tensors on the logits' device. `None` = no row uses that filter."""

    seed_B: Tensor
    """int64."""
    temperature_B1: Tensor | None
    """1 where the row is greedy; `None` = 1 everywhere."""
    greedy_B: Tensor | None
    top_k_B: Tensor | None
    """int64; 0 = off for that row."""
    top_ks: frozenset[int]
    """The distinct values, on the host."""
    top_p_B: Tensor | None
    min_p_B: Tensor | None

    @classmethod
    def build(cls, params: Sequence[SamplingParams], seeds: Sequence[int], device: torch.device) -> RowParams:
        """One row per element of `params` and of `seeds`."""

        def column(values: list[float] | list[int] | list[bool], off: float, dtype: torch.dtype) -> Tensor | None:
            return to_device(device, values, dtype) if set(values) != {off} else None

        temperature_B = column([p.temperature or 1.0 for p in params], 1.0, torch.float32)
        return cls(
            seed_B=to_device(device, seeds, torch.int64),
            temperature_B1=None if temperature_B is None else temperature_B[:, None],
            greedy_B=column([p.temperature == 0 for p in params], False, torch.bool),
            top_k_B=column([p.top_k for p in params], 0, torch.int64),
            top_ks=frozenset(p.top_k for p in params),
            top_p_B=column([p.top_p for p in params], 1.0, torch.float32),
            min_p_B=column([p.min_p for p in params], 0.0, torch.float32),
        )

    def select(self, index: Tensor | slice) -> RowParams:
        """The rows at `index`, in that order."""

        def pick(column: Tensor | None) -> Tensor | None:
            return None if column is None else column[index]

        return RowParams(
            seed_B=self.seed_B[index],
            temperature_B1=pick(self.temperature_B1),
            greedy_B=pick(self.greedy_B),
            top_k_B=pick(self.top_k_B),
            top_ks=self.top_ks,
            top_p_B=pick(self.top_p_B),
            min_p_B=pick(self.min_p_B),
        )


def sample(logits_BV: Tensor, params: RowParams, position_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One token per row: ids (int64), logprobs (float32) and whether the row's logits were usable, each of shape [B].

    position_B: how many tokens each row has sampled so far; with the seed it fixes the random number. Logprobs are
    under the distribution after filters, renormalised; a greedy row's is 0, since its distribution puts probability 1
    on the most likely token. Where the third result is False the logits held NaN or +inf (or only -inf) and the row's
    token is meaningless.
    """
    rows = max(1, _MAX_DRAW_ELEMENTS // logits_BV.shape[1])
    if logits_BV.shape[0] <= rows:
        return _sample_slice(logits_BV, params, position_B)
    starts = range(0, logits_BV.shape[0], rows)
    slices = [slice(s, s + rows) for s in starts]
    parts = [_sample_slice(logits_BV[s], params.select(s), position_B[s]) for s in slices]
    ids, logprobs, usable = zip(*parts, strict=True)
    return torch.cat(ids), torch.cat(logprobs), torch.cat(usable)


def _sample_slice(logits_BV: Tensor, params: RowParams, position_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    probs_BV = torch.softmax(filter_logits(logits_BV, params), dim=-1)
    u_B = uniforms(params.seed_B, position_B)
    token_B, usable_B = draw(probs_BV, u_B)
    logprob_B = probs_BV.gather(1, token_B[:, None])[:, 0].log()
    if params.greedy_B is not None:
        token_B = torch.where(params.greedy_B, logits_BV.argmax(dim=-1), token_B)
        logprob_B = torch.where(params.greedy_B, 0.0, logprob_B)
    return token_B, logprob_B, usable_B


def filter_logits(logits_BV: Tensor, params: RowParams) -> Tensor:
    """float32 logits after temperature, min-p, top-k and top-p: dropped tokens are -inf, the others logits / T."""
    scaled_BV = logits_BV.float()
    if params.temperature_B1 is not None:
        scaled_BV = scaled_BV / params.temperature_B1
    if params.min_p_B is not None:
        floor_B1 = scaled_BV.amax(dim=-1, keepdim=True) + params.min_p_B.log()[:, None]
        scaled_BV = scaled_BV.masked_fill(scaled_BV < floor_B1, -torch.inf)
    if params.top_k_B is not None:
        scaled_BV = _keep_top_k(scaled_BV, params.top_k_B, params.top_ks)
    if params.top_p_B is not None:
        scaled_BV = _keep_top_p(scaled_BV, params.top_p_B)
    return scaled_BV


def _keep_top_k(scaled_BV: Tensor, top_k_B: Tensor, top_ks: frozenset[int]) -> Tensor:
    vocab_size = scaled_BV.shape[1]
    k_B = torch.where(top_k_B > 0, top_k_B, vocab_size).clamp(max=vocab_size)
    limited_B = k_B < vocab_size
    k_max = max((k for k in top_ks if 0 < k < vocab_size), default=1)
    top_BK = scaled_BV.topk(k_max, dim=-1).values
    kth_B1 = top_BK.gather(1, (k_B - 1).clamp(max=k_max - 1)[:, None])
    return scaled_BV.masked_fill((scaled_BV < kth_B1) & limited_B[:, None], -torch.inf)


def _keep_top_p(scaled_BV: Tensor, top_p_B: Tensor) -> Tensor:
    sorted_BV, order_BV = scaled_BV.sort(dim=-1, descending=True, stable=True)
    probs_BV = torch.softmax(sorted_BV, dim=-1)
    more_likely_BV = probs_BV.cumsum(dim=-1) - probs_BV
    drop_BV = (more_likely_BV >= top_p_B[:, None]) & (top_p_B < 1)[:, None]
    drop_BV[:, 0] = False
    return scaled_BV.masked_fill(torch.zeros_like(drop_BV).scatter(1, order_BV, drop_BV), -torch.inf)


def draw(probs_BV: Tensor, u_B: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse-CDF draw: the token at which the cumulated probability passes u. Returns ids and "row was usable", [B].

    probs_BV: non-negative weights, not all 0; they need not sum to 1. A token of weight 0 is never drawn.
    Two levels: pick a chunk of the vocabulary by the chunks' sums, then a token inside it. At 151,936 tokens that is
    three times as fast as one cumulated sum on CPU, and the float64 sums over few numbers leave no rounding bias.
    """
    batch, vocab_size = probs_BV.shape
    if vocab_size % _CHUNK:
        probs_BV = torch.nn.functional.pad(probs_BV, (0, -vocab_size % _CHUNK))
    probs_BNC = probs_BV.view(batch, -1, _CHUNK)
    mass_BN = probs_BNC.sum(dim=-1).to(u_B.dtype)
    total_B1 = mass_BN.sum(dim=-1, keepdim=True)
    chunk_B1, rest_B1 = _pick(mass_BN, u_B[:, None] * total_B1)
    inside_BC = probs_BNC.gather(1, chunk_B1[:, :, None].expand(-1, 1, _CHUNK))[:, 0]
    token_B1, _ = _pick(inside_BC.to(u_B.dtype), rest_B1)
    return (chunk_B1 * _CHUNK + token_B1)[:, 0], torch.isfinite(total_B1[:, 0])


def _pick(weights_BK: Tensor, target_B1: Tensor) -> tuple[Tensor, Tensor]:
    """The index at which the cumulated weights pass `target`, and the remainder of the target inside it, both [B, 1].

    Rounding can put the target at or past the end, or (parallel sums) on a weight of 0; then the heaviest index is
    taken.
    """
    cdf_BK = weights_BK.cumsum(dim=-1)
    index_B1 = torch.searchsorted(cdf_BK, target_B1, right=True).clamp(max=weights_BK.shape[1] - 1)
    index_B1 = torch.where(weights_BK.gather(1, index_B1) > 0, index_B1, weights_BK.argmax(dim=-1, keepdim=True))
    before_B1 = (cdf_BK - weights_BK).gather(1, index_B1)
    return index_B1, (target_B1 - before_B1).clamp(min=0)


def uniforms(seed_B: Tensor, position_B: Tensor) -> Tensor:
    """A number strictly inside (0, 1) per row that depends on its seed and position alone.

    float64 with 52 random bits; float32 with 23 on devices without float64. The generator is splitmix64 (Steele, Lea,
    Flood 2014) started at the mixed seed, so neighbouring seeds give unrelated streams.
    """
    bits_B = _mix(_mix(seed_B) + (position_B + 1) * _signed(_GOLDEN))
    if seed_B.device.type == "mps":
        return (_shift(bits_B, 41).float() + 0.5) * 2.0**-23
    return (_shift(bits_B, 12).double() + 0.5) * 2.0**-52


_GOLDEN = 0x9E3779B97F4A7C15


def _mix(z_B: Tensor) -> Tensor:
    """splitmix64's finaliser; int64 multiplication wraps, as the algorithm wants."""
    z_B = (z_B ^ _shift(z_B, 30)) * _signed(0xBF58476D1CE4E5B9)
    z_B = (z_B ^ _shift(z_B, 27)) * _signed(0x94D049BB133111EB)
    return z_B ^ _shift(z_B, 31)


def _shift(z_B: Tensor, bits: int) -> Tensor:
    """Logical right shift (`>>` keeps the sign of an int64)."""
    return (z_B >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """`value` modulo 2**64 as an int64."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value
