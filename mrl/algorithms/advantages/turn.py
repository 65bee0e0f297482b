"""Turn-level advantages: each turn's return, relative to the same turn of the group's other rollouts.

Credit goes to the turn that earned it and not to the whole rollout (turn-level GRPO: arXiv 2505.11821). A rollout of
one turn has GRPO's advantage.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.algorithms.advantages.base import Advantage, AdvantageInputs, AdvantageSettings
from mrl.algorithms.advantages.group import group_advantages
from mrl.algorithms.turns import returns_to_go


def turn(inputs: AdvantageInputs, settings: AdvantageSettings) -> list[Tensor]:
    """G_k = Σ_{j ≥ k} γ^(j-k) r_j of each turn, relative to the group's rollouts that have a turn k, scaled as GRPO's.

    Every sampled token gets its turn's advantage. A turn that only one rollout reached gets 0.
    """
    returns = [returns_to_go(rewards, settings.discount) for rewards in inputs.turn_rewards]
    counts = torch.tensor([len(row) for row in returns], dtype=torch.long)
    if not counts.sum():
        return [torch.zeros(0, dtype=torch.float64) for _ in returns]
    places_N = torch.cat([torch.arange(count) for count in counts.tolist()])
    items_N = inputs.groups_B.repeat_interleave(counts) * (int(counts.max()) + 1) + places_N
    returns_N = torch.tensor([value for row in returns for value in row], dtype=torch.float64)
    advantages_N = group_advantages(returns_N, items_N, settings.scale)
    return [
        own.repeat_interleave(torch.tensor(lengths, dtype=torch.long))
        for own, lengths in zip(advantages_N.split(counts.tolist()), inputs.turn_lengths, strict=True)
    ]


TURN = Advantage(turn, reads="steps", options=("scale_rewards", "discount"))
