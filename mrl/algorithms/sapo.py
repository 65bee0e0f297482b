"""SAPO: a soft gate in the place of the clip (arXiv 2511.20347, eq. 5-6).

The gate's slope is 1 at ratio 1 and falls off on both sides, faster for a higher temperature; negative advantages get a
slightly higher one, since they move probability onto many other tokens. Averaged like GRPO.
"""

from __future__ import annotations

import torch

from mrl.algorithms.base import Loss, LossSettings, LossTerms, PolicyLoss


def sapo(terms: LossTerms, settings: LossSettings) -> PolicyLoss:
    """-(4/τ) sigmoid(τ (r - 1)) A with τ chosen by the sign of A; B×T."""
    ratio_BT = torch.exp(terms.logprobs_BT - terms.old_logprobs_BT)
    tau_BT = torch.where(terms.advantages_BT > 0, settings.sapo_temperature_pos, settings.sapo_temperature_neg)
    loss_BT = -torch.sigmoid(tau_BT * (ratio_BT - 1)) * 4 / tau_BT * terms.advantages_BT
    never_BT = torch.zeros_like(ratio_BT, dtype=torch.bool)
    return PolicyLoss(loss_BT, ratio_BT.detach(), clipped_low_BT=never_BT, clipped_high_BT=never_BT)


SAPO = Loss(sapo, normalization="sequences")
