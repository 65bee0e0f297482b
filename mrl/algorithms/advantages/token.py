"""Token-level advantages: each token's return, discounted per token.

A turn's reward is given at its last token (as in PPO for language models, arXiv 2203.02155), so with a discount below 1
tokens close to a reward get more of it. Without a discount every token of a turn has the turn's return.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from mrl.algorithms.advantages.base import Advantage, AdvantageInputs, AdvantageSettings, check_finite
from mrl.algorithms.advantages.group import baseline_and_divisor
from mrl.algorithms.turns import returns_to_go


def token(inputs: AdvantageInputs, settings: AdvantageSettings) -> list[Tensor]:
    """G_t = Σ_{u ≥ t} γ^(u-t) r_u over sampled tokens, relative to the same turn of the group's other rollouts.

    The baseline uses each turn's mean over its tokens, so that long turns weigh no more than short ones. With γ = 1
    every token gets what `turn` gives.
    """
    returns = [
        _token_returns(*row, settings.discount) for row in zip(inputs.turn_rewards, inputs.turn_lengths, strict=True)
    ]
    turns = [part for own, lengths in zip(returns, inputs.turn_lengths, strict=True) for part in own.split(lengths)]
    counts = torch.tensor([len(lengths) for lengths in inputs.turn_lengths], dtype=torch.long)
    if not turns:
        return returns
    places_N = torch.cat([torch.arange(count) for count in counts.tolist()])
    items_N = inputs.groups_B.repeat_interleave(counts) * (int(counts.max()) + 1) + places_N
    means_N = torch.stack([part.mean() for part in turns])
    check_finite(means_N)
    baselines_N, divisors_N = baseline_and_divisor(means_N, items_N, settings.scale)
    relative = [(part - b) / d for part, b, d in zip(turns, baselines_N, divisors_N, strict=True)]
    ends = [0, *counts.cumsum(0).tolist()]
    return [torch.cat([*relative[start:end], means_N[:0]]) for start, end in pairwise(ends)]


def _token_returns(rewards: list[float], lengths: list[int], discount: float) -> Tensor:
    earned = [value for r, n in zip(rewards, lengths, strict=True) for value in [0.0] * (n - 1) + [r]]
    return torch.tensor(returns_to_go(earned, discount), dtype=torch.float64)


TOKEN = Advantage(token, reads="steps", options=("scale_rewards", "discount"))
