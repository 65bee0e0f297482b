"""Estimates the temperature, or the sampling filter, that a sampler really used from the logprobs that it reported.

A sampler reports log q(token). q is the model's distribution at a temperature T, filtered (top-p, top-k, min-p) and
renormalised: log q = logit / T - logsumexp over the kept tokens of logit / T. The functions here search for the T, or
the filter, under which this fits best over some tokens. N tokens, V vocabulary.
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
class SamplingFilter:
    """Which tokens of a distribution may be sampled; the defaults keep all. Fields as in `SamplingParams`."""

    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @property
    def largest_gain(self) -> float:
        """The most a kept token's logprob can gain from renormalisation, in nats; inf where there is no bound.

        Top-p keeps a probability mass of at least p. What top-k and min-p keep depends on the distribution.
        """
        return math.inf if self.top_k or self.min_p else -math.log(self.top_p)


@dataclass(frozen=True)
class SamplingEstimate:
    """The value of one sampling option under which the model's logprobs are nearest to the sampler's."""

    name: str
    """temperature, top_p, top_k or min_p."""
    value: float
    residual: float
    """Mean |log q - log q of the sampler| under that value, in nats per token."""


class ScoredTokens:
    """Sampled tokens with the model's logits and the sampler's logprobs.

    logits_NV: before any temperature. targets_N: the sampled ids. sampler_N: the sampler's logprobs of them.
    """

    def __init__(self, logits_NV: Tensor, targets_N: Tensor, sampler_N: Tensor) -> None:
        logits_NV = logits_NV.float()
        self.chosen_N = logits_NV.gather(1, targets_N[:, None])[:, 0]
        self.sorted_NV = logits_NV.sort(dim=-1, descending=True).values
        self.sampler_N = sampler_N.float()

    def logprobs(self, temperature: float, sampling_filter: SamplingFilter) -> Tensor:
        """The model's logprobs of the tokens at this temperature under this filter; N.

        A token that the filter drops gets the logprob it would have if kept: the sampler did draw it, so the sampler's
        own threshold differs slightly.
        """
        scaled_NV = self.sorted_NV / temperature
        kept_NV = torch.ones_like(scaled_NV, dtype=torch.bool)
        if sampling_filter.min_p:
            kept_NV &= scaled_NV >= scaled_NV[:, :1] + math.log(sampling_filter.min_p)
        if sampling_filter.top_k:
            kept_NV &= scaled_NV >= scaled_NV[:, min(sampling_filter.top_k, scaled_NV.shape[1]) - 1, None]
        if sampling_filter.top_p < 1:
            probs_NV = torch.softmax(scaled_NV.masked_fill(~kept_NV, -torch.inf), dim=-1)
            kept_NV &= (probs_NV.cumsum(dim=-1) - probs_NV) < sampling_filter.top_p
            kept_NV[:, 0] = True
        return self.chosen_N / temperature - scaled_NV.masked_fill(~kept_NV, -torch.inf).logsumexp(dim=-1)

    def gap(self, temperature: float, sampling_filter: SamplingFilter) -> float:
        """Mean |log q - log q of the sampler| at this temperature under this filter, in nats per token."""
        return (self.logprobs(temperature, sampling_filter) - self.sampler_N).abs().mean().item()


def estimate_temperature(tokens: ScoredTokens, temperature: float, sampling_filter: SamplingFilter) -> SamplingEstimate:
    """The temperature that fits best, whether the sampler reports logprobs after its filter or before it.

    temperature, sampling_filter: the configured ones.
    """
    estimates = []
    for tried in dict.fromkeys((sampling_filter, SamplingFilter())):
        centre, span = math.log(temperature), math.log(WIDEST_TEMPERATURE)
        for _ in range(6):  # each round searches a finer grid around the last best: a thousandth in the end
            grid = [centre + span * step / 4 for step in range(-4, 5)]
            centre = min(grid, key=lambda place: tokens.gap(math.exp(place), tried))
            span /= 4
        value = math.exp(centre)
        estimates.append(SamplingEstimate("temperature", value, tokens.gap(value, tried)))
    return min(estimates, key=lambda estimate: estimate.residual)


def estimate_filter(tokens: ScoredTokens, temperature: float, sampling_filter: SamplingFilter) -> SamplingEstimate:
    """The one filter option that fits best, alone or combined with the configured filter (`sampling_filter`).

    A filter raises the sampled token's logprob by -log(kept mass), and the kept mass tells how many of the most likely
    tokens were kept. `top_k` is that number; `top_p` and `min_p` lie between the last token kept and the next.
    """
    estimates = [
        SamplingEstimate(name, float(value), tokens.gap(temperature, replace(base, **changes)))
        for changes in _candidates(tokens, temperature)
        for name, value in changes.items()
        for base in dict.fromkeys((sampling_filter, SamplingFilter()))
    ]
    return min(estimates, key=lambda estimate: estimate.residual)


def _candidates(tokens: ScoredTokens, temperature: float) -> Iterator[dict[str, Any]]:
    vocab_size = tokens.sorted_NV.shape[1]
    probs_NV = torch.softmax(tokens.sorted_NV / temperature, dim=-1)
    mass_NV = probs_NV.cumsum(dim=-1)
    kept_N = torch.exp(tokens.logprobs(temperature, SamplingFilter()) - tokens.sampler_N).nan_to_num(1.0, 1.0, 1.0)
    last_N1 = torch.searchsorted(mass_NV, kept_N[:, None].clamp(max=1.0)).clamp(max=vocab_size - 1)
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
    next_N = probs_NV.gather(1, (last_N1 + 1).clamp(max=vocab_size - 1))[:, 0]
    for min_p in _between(next_N / top_N, probs_N / top_N):
        if 0 < min_p < 1:
            yield {"min_p": min_p}


def _between(low_N: Tensor, high_N: Tensor) -> list[float]:
    """A number above (almost) all lows and below (almost) all highs, with as few digits as possible; [] if there is
    none. A tenth of each may be outliers."""
    low, high = low_N.quantile(0.9).item(), high_N.quantile(0.1).item()
    middle = (low + high) / 2
    if not math.isfinite(middle):
        return []
    round_ones = [round(middle, digits) for digits in (1, 2, 3) if low <= round(middle, digits) <= high]
    return [*round_ones, middle][:1]
