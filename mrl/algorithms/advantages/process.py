"""Process supervision: every step's reward is normalised, then summed from each turn on (arXiv 2402.03300, 4.1.3)."""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.algorithms.advantages.base import Advantage, AdvantageInputs, AdvantageSettings
from mrl.algorithms.advantages.group import group_advantages
from mrl.algorithms.turns import returns_to_go


def process(inputs: AdvantageInputs, settings: AdvantageSettings) -> list[Tensor]:
    """A_k = Σ_{j ≥ k} γ^(j-k) r̃_j, r̃ the turns' rewards relative to those of all turns of the group, scaled as GRPO's.

    Every sampled token gets its turn's advantage. The paper has no discount (γ = 1).
    """
    counts = torch.tensor([len(row) for row in inputs.turn_rewards], dtype=torch.long)
    rewards_N = torch.tensor([value for row in inputs.turn_rewards for value in row], dtype=torch.float64)
    relative_N = group_advantages(rewards_N, inputs.groups_B.repeat_interleave(counts), settings.scale)
    return [
        torch.tensor(returns_to_go(own.tolist(), settings.discount), dtype=torch.float64).repeat_interleave(
            torch.tensor(lengths, dtype=torch.long)
        )
        for own, lengths in zip(relative_N.split(counts.tolist()), inputs.turn_lengths, strict=True)
    ]


PROCESS = Advantage(process, reads="steps", options=("scale_rewards", "discount"))
