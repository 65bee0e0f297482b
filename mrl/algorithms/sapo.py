"""SAPO: a soft gate instead of the clip (arXiv 2511.20347, eq. 5-6).

The gate's slope is 1 at ratio 1 and falls off on both sides, faster for a higher temperature; negative advantages get a
slightly higher one, since they move probability onto many other tokens. Averaged like GRPO.
"""

from __future__ import annotations

import torch

from mrl.algorithms.base import Loss, LossSettings, LossTerms, PolicyLoss
from mrl.algorithms.ratio import importance_ratio


def sapo(terms: LossTerms, settings: LossSettings) -> PolicyLoss:
    """-(4/τ) sigmoid(τ (r - 1)) A with τ chosen by the sign of A; B×T."""
    ratio_BT = importance_ratio(terms, settings.level)
    tau_BT = torch.where(terms.advantages_BT > 0, settings.sapo_temperature_pos, settings.sapo_temperature_neg)
    loss_BT = -torch.sigmoid(tau_BT * (ratio_BT - 1)) * 4 / tau_BT * terms.advantages_BT
    return PolicyLoss(loss_BT, ratio_BT.detach())


SAPO = Loss(
    sapo,
    normalization="sequences",
    options=("sapo_temperature_pos", "sapo_temperature_neg", "importance_sampling_level"),
    levels=("token", "sequence"),
)
