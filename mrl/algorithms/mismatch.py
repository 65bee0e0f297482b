"""Correction for the difference between the distribution that was sampled and the one being trained.

The two differ by engine and precision, and by top-p, top-k or min-p, which the trainer does not apply. Each token is
weighed by π_old / π_sampler (truncated importance sampling: Yao et al., "Your Efficient RL Framework Secretly Brings
You Off-Policy RL Training", 2025).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Correction = Literal["none", "truncated", "masked"]


def importance_weights(
    old_logprobs_BT: Tensor, sampler_logprobs_BT: Tensor, mask_BT: Tensor, correction: Correction, cap: float
) -> Tensor:
    """Weight of each token's policy loss, B×T: min(w, cap) for `truncated`, w or 0 above the cap for `masked`, else 1.

    Positions outside the mask weigh 1 (the mask removes them later).
    """
    if correction == "none":
        return torch.ones_like(old_logprobs_BT)
    weights_BT = torch.exp(old_logprobs_BT - sampler_logprobs_BT)
    weights_BT = weights_BT.clamp(max=cap) if correction == "truncated" else weights_BT * (weights_BT <= cap)
    return torch.where(mask_BT.bool(), weights_BT, torch.ones_like(weights_BT))
