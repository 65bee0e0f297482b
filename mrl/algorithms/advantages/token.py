"""By token: the return from a token on, discounted by the tokens in between.

A turn's reward is earned at its last token (as in PPO for language models, arXiv 2203.02155), so with a discount below
1 tokens close to a reward get more of it. Without a discount every token of a turn has the turn's return.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.algorithms.advantages.base import Advantage, AdvantageInputs, AdvantageSettings
from mrl.algorithms.advantages.group import group_advantages
from mrl.algorithms.turns import returns_to_go


def token(inputs: AdvantageInputs, settings: AdvantageSettings) -> list[Tensor]:
    """G_t = Σ_{u ≥ t} γ^(u-t) r_u over sampled tokens, relative to all tokens of the group's turns k, scaled as GRPO's.

    A token counts once, so long turns weigh more in the mean that is subtracted.
    """
    returns, places, counts = [], [], []
    for rewards, lengths in zip(inputs.turn_rewards, inputs.turn_lengths, strict=True):
        earned: list[float] = []
        for place, (reward, length) in enumerate(zip(rewards, lengths, strict=True)):
            earned += [0.0] * (length - 1) + [reward]
            places += [place] * length
        returns += returns_to_go(earned, settings.discount)
        counts.append(len(earned))
    if not places:
        return [torch.zeros(0, dtype=torch.float64) for _ in counts]
    groups_N = inputs.groups_B.repeat_interleave(torch.tensor(counts, dtype=torch.long))
    items_N = groups_N * (max(places) + 1) + torch.tensor(places, dtype=torch.long)
    returns_N = torch.tensor(returns, dtype=torch.float64)
    return list(group_advantages(returns_N, items_N, settings.scale).split(counts))


TOKEN = Advantage(token, reads="steps", options=("scale_rewards", "discount"))
