"""The clipped surrogate of PPO (arXiv 1707.06347, eq. 7), which grpo, dapo, dr_grpo, bnpo, gspo and luspo share."""

from __future__ import annotations

import torch

from mrl.algorithms.base import LossSettings, LossTerms, PolicyLoss
from mrl.algorithms.ratio import importance_ratio

OPTIONS = ("epsilon", "epsilon_high", "delta", "importance_sampling_level")


def clipped_surrogate(terms: LossTerms, settings: LossSettings) -> PolicyLoss:
    """-min(min(r, δ) A, clip(r, 1 - ε_low, 1 + ε_high) A) with r = π/π_old of the token or the sequence; B×T.

    δ bounds the loss where A < 0 and the ratio has grown (dual clip, arXiv 1912.09729 and 2505.07291); None leaves it
    unbounded.
    """
    ratio_BT = importance_ratio(terms, settings.level)
    low, high = 1 - settings.epsilon_low, 1 + settings.epsilon_high
    advantages_BT = terms.advantages_BT
    bounded_BT = ratio_BT if settings.delta is None else ratio_BT.clamp(max=settings.delta)
    loss_BT = -torch.minimum(bounded_BT * advantages_BT, ratio_BT.clamp(low, high) * advantages_BT)
    clipped_high_BT = (ratio_BT > high) & (advantages_BT > 0)
    if settings.delta is not None:
        clipped_high_BT |= (ratio_BT > settings.delta) & (advantages_BT < 0)
    return PolicyLoss(
        loss_BT,
        ratio_BT.detach(),
        clipped_low_BT=(ratio_BT < low) & (advantages_BT < 0),
        clipped_high_BT=clipped_high_BT,
    )
