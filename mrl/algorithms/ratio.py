"""The ratio r = π/π_old, of a token or of a sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.algorithms.base import Level, LossTerms


def importance_ratio(terms: LossTerms, level: Level) -> Tensor:
    """π/π_old; B×T, with gradient, 1 outside the mask.

    token: of each token. sequence: s = exp(mean over the sequence's tokens of log π/π_old), the same for all of them
    (GSPO, arXiv 2507.18071, eq. 7): the geometric mean, so that long sequences stay in the range of short ones.
    """
    mask_BT = terms.mask_BT.bool()
    # Not multiplied by the mask: values outside it may be anything, also inf.
    log_ratio_BT = torch.where(mask_BT, terms.logprobs_BT - terms.old_logprobs_BT, 0.0)
    if level == "sequence":
        mean_B1 = log_ratio_BT.sum(dim=1, keepdim=True) / mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
        log_ratio_BT = mean_B1.expand_as(log_ratio_BT)
    return torch.exp(log_ratio_BT)
