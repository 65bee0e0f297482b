"""What was sampled with, read off the sampler's logprobs: which temperature, or which cut, would make them the model's.

A sampler reports log q(token), q being the model's distribution at a temperature, cut (top-p, top-k, min-p) and
renormalised: log q = logit / T - logsumexp over the kept of logit / T. The functions here search T, or the cut, for the
value under which this holds best over some tokens. N tokens, V words.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

WIDEST_TEMPERATURE = 8.0
"""Temperatures are searched from T / 8 to 8 T."""


@dataclass(frozen=True)
class Cut:
    """What of a distribution is sampled from; the defaults cut nothing. As in `SamplingParams`."""

    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @property
    def largest_gain(self) -> float:
        """The most that a kept token's logprob can gain by the renormalisation, in nats; inf where nothing bounds it.

        Top-p keeps at least a mass of p. What top-k and min-p keep depends on the distribution alone.
        """
        return math.inf if self.top_k or self.min_p else -math.log(self.top_p)


@dataclass(frozen=True)
class Fit:
    """The temperature, or the option of the cut, under which the sampler's logprobs are nearest to the model's."""

    name: str
    value: float
    residual: float
    """Mean |log q - log q of the sampler| that is left, in nats per token."""


class Evidence:
    """Tokens with the model's logits for them and what the sampler said.

    logits_NV: before any temperature. targets_N: the sampled ids. sampler_N: the sampler's logprobs of them.
    """

    def __init__(self, logits_NV: Tensor, targets_N: Tensor, sampler_N: Tensor) -> None:
        logits_NV = logits_NV.float()
        self.chosen_N = logits_NV.gather(1, targets_N[:, None])[:, 0]
        self.sorted_NV = logits_NV.sort(dim=-1, descending=True).values
        self.sampler_N = sampler_N.float()

    def logprobs(self, temperature: float, cut: Cut) -> Tensor:
        """Of the tokens, N: under the model at this temperature with this cut. A token outside the cut has what it
        would have inside: the sampler drew it, so its own cut lies a little beside."""
        scaled_NV = self.sorted_NV / temperature
        kept_NV = torch.ones_like(scaled_NV, dtype=torch.bool)
        if cut.min_p:
            kept_NV &= scaled_NV >= scaled_NV[:, :1] + math.log(cut.min_p)
        if cut.top_k:
            kept_NV &= scaled_NV >= scaled_NV[:, min(cut.top_k, scaled_NV.shape[1]) - 1, None]
        if cut.top_p < 1:
            probs_NV = torch.softmax(scaled_NV.masked_fill(~kept_NV, -torch.inf), dim=-1)
            kept_NV &= (probs_NV.cumsum(dim=-1) - probs_NV) < cut.top_p
            kept_NV[:, 0] = True
        return self.chosen_N / temperature - scaled_NV.masked_fill(~kept_NV, -torch.inf).logsumexp(dim=-1)

    def gap(self, temperature: float, cut: Cut) -> float:
        """Mean |log q - log q of the sampler| under these, in nats per token."""
        return (self.logprobs(temperature, cut) - self.sampler_N).abs().mean().item()


def fit_temperature(evidence: Evidence, temperature: float, cut: Cut) -> Fit:
    """The temperature nearest to what the sampler said, whether it cut as it was told (`cut`) or reports logprobs from
    before the cut. temperature: what was asked for."""
    fits = []
    for tried in dict.fromkeys((cut, Cut())):
        centre, span = math.log(temperature), math.log(WIDEST_TEMPERATURE)
        for _ in range(6):  # each round looks closer around the best of the last: to a thousandth in the end
            grid = [centre + span * step / 4 for step in range(-4, 5)]
            centre = min(grid, key=lambda place: evidence.gap(math.exp(place), tried))
            span /= 4
        value = math.exp(centre)
        fits.append(Fit("temperature", value, evidence.gap(value, tried)))
    return min(fits, key=lambda fit: fit.residual)


def fit_cut(evidence: Evidence, temperature: float, cut: Cut) -> Fit:
    """The option of a cut under which the sampler's logprobs fit best, alone or beside what was asked for (`cut`).

    A cut shows itself: the sampled token's logprob has gained -log(kept mass), and the kept mass says how many of the
    likeliest words were kept. `top_k` is that number, `top_p` and `min_p` lie between the last word kept and the next.
    """
    fits = [
        Fit(name, float(value), evidence.gap(temperature, replace(base, **changes)))
        for changes in _candidates(evidence, temperature)
        for name, value in changes.items()
        for base in dict.fromkeys((cut, Cut()))
    ]
    return min(fits, key=lambda fit: fit.residual)


def _candidates(evidence: Evidence, temperature: float) -> Iterator[dict[str, Any]]:
    words = evidence.sorted_NV.shape[1]
    probs_NV = torch.softmax(evidence.sorted_NV / temperature, dim=-1)
    mass_NV = probs_NV.cumsum(dim=-1)
    kept_N = torch.exp(evidence.logprobs(temperature, Cut()) - evidence.sampler_N).nan_to_num(1.0, 1.0, 1.0)
    last_N1 = torch.searchsorted(mass_NV, kept_N[:, None].clamp(max=1.0)).clamp(max=words - 1)
    before_N1 = (last_N1 - 1).clamp(min=0)
    nearer_N1 = (mass_NV.gather(1, before_N1) - kept_N[:, None]).abs() < (
        mass_NV.gather(1, last_N1) - kept_N[:, None]
    ).abs()
    last_N1 = torch.where(nearer_N1, before_N1, last_N1)
    yield {"top_k": int(last_N1.median()) + 1}
    mass_N, probs_N = mass_NV.gather(1, last_N1)[:, 0], probs_NV.gather(1, last_N1)[:, 0]
    for top_p in _between(mass_N - probs_N, mass_N):
        if 0 < top_p < 1:
            yield {"top_p": top_p}
    top_N = probs_NV[:, 0]
    next_N = probs_NV.gather(1, (last_N1 + 1).clamp(max=words - 1))[:, 0]
    for min_p in _between(next_N / top_N, probs_N / top_N):
        if 0 < min_p < 1:
            yield {"min_p": min_p}


def _between(low_N: Tensor, high_N: Tensor) -> list[float]:
    """A number between all the lows and all the highs but some that are off, the roundest there is; [] for none."""
    low, high = low_N.quantile(0.9).item(), high_N.quantile(0.1).item()
    middle = (low + high) / 2
    if not math.isfinite(middle):
        return []
    round_ones = [round(middle, digits) for digits in (1, 2, 3) if low <= round(middle, digits) <= high]
    return [*round_ones, middle][:1]
