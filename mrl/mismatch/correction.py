"""Importance weights for the difference between the sampling distribution and the trained policy.

The two differ by engine and precision, and by top-p, top-k or min-p, which the trainer does not apply. The weight is
w = π_old / π_sampler, of each token or of the whole sequence (the product over its tokens). It is bounded, since a few
large weights would dominate:

- truncated: moved to the nearest bound (Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL
  Training", 2025);
- masked: 0 outside the bounds (Liu et al., "When Speed Kills Stability", 2025). With a lower bound on tokens this is
  IcePop (Zhao et al., "Small Leak Can Sink a Great Ship", 2025; 0.5 to 5.0 there).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Correction = Literal["none", "truncated", "masked", "sequence_truncated", "sequence_masked"]


def importance_weights(
    old_logprobs_BT: Tensor,
    sampler_logprobs_BT: Tensor,
    mask_BT: Tensor,
    correction: Correction,
    cap: float | None,
    floor: float | None = None,
) -> Tensor:
    """Weight of each token's policy loss, B×T. cap, floor: bounds of w; None = none on that side.

    Positions outside the mask get 1 (the mask removes them later) and do not enter a sequence's weight.
    """
    if correction == "none":
        return torch.ones_like(old_logprobs_BT)
    inside_BT = mask_BT.bool()
    weights_BT = torch.exp(log_importance(old_logprobs_BT, sampler_logprobs_BT, mask_BT, correction))
    if correction.endswith("truncated"):
        weights_BT = weights_BT.clamp(min=floor or 0.0, max=cap)
    else:
        outside_BT = torch.zeros_like(inside_BT)
        if cap is not None:
            outside_BT = outside_BT | (weights_BT > cap)
        if floor is not None:
            outside_BT = outside_BT | (weights_BT < floor)
        weights_BT = weights_BT.masked_fill(outside_BT, 0.0)
    return torch.where(inside_BT, weights_BT, 1.0)


def log_importance(
    old_logprobs_BT: Tensor, sampler_logprobs_BT: Tensor, mask_BT: Tensor, correction: Correction
) -> Tensor:
    """log w before any bound, B×T: of each token, or for `sequence_` corrections of its whole sequence."""
    log_weights_BT = torch.where(mask_BT.bool(), old_logprobs_BT - sampler_logprobs_BT, 0.0)
    if correction.startswith("sequence_"):
        log_weights_BT = log_weights_BT.sum(dim=1, keepdim=True).expand_as(log_weights_BT)
    return log_weights_BT


def weighed_once(mask_BT: Tensor, correction: Correction) -> Tensor:
    """True once for each distinct weight, B×T: at every token of the mask, or at the first of each sequence."""
    inside_BT = mask_BT.bool()
    if not correction.startswith("sequence_"):
        return inside_BT
    return inside_BT & (inside_BT.cumsum(dim=1) == 1)


def unexplained_gap(old_logprobs_BT: Tensor, sampler_logprobs_BT: Tensor, largest_gain: float) -> Tensor:
    """The part of each token's logprob gap that the configured sampling filter does not explain, B×T, in nats, >= 0.

    A filter (top-p …) makes the sampler's logprob larger than the trainer's, by at most `largest_gain`
    (`SamplingFilter.largest_gain`). What lies outside [0, largest_gain] has another cause. Without a filter this is the
    whole gap.
    """
    gap_BT = sampler_logprobs_BT - old_logprobs_BT
    return (-gap_BT).clamp(min=0) + (gap_BT - largest_gain).clamp(min=0)
