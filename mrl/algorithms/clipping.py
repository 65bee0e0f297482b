"""The clipped surrogate of PPO (arXiv 1707.06347, eq. 7), which grpo, dapo, dr_grpo and bnpo share."""

from __future__ import annotations

import torch

from mrl.algorithms.base import LossSettings, LossTerms, PolicyLoss


def clipped_surrogate(terms: LossTerms, settings: LossSettings) -> PolicyLoss:
    """-min(r A, clip(r, 1 - ε_low, 1 + ε_high) A) with r = π/π_old; B×T."""
    ratio_BT = torch.exp(terms.logprobs_BT - terms.old_logprobs_BT)
    low, high = 1 - settings.epsilon_low, 1 + settings.epsilon_high
    advantages_BT = terms.advantages_BT
    loss_BT = -torch.minimum(ratio_BT * advantages_BT, ratio_BT.clamp(low, high) * advantages_BT)
    return PolicyLoss(
        loss_BT,
        ratio_BT.detach(),
        clipped_low_BT=(ratio_BT < low) & (advantages_BT < 0),
        clipped_high_BT=(ratio_BT > high) & (advantages_BT > 0),
    )
