"""Selecting the tokens to train on by the entropy of their distribution."""

from __future__ import annotations

import torch
from torch import Tensor


def top_entropy_mask(entropy_BT: Tensor, mask_BT: Tensor, quantile: float) -> Tensor:
    """True on the share `quantile` of the batch's tokens with the highest entropy; B×T bool, False outside the mask.

    A few high-entropy tokens decide where a chain of thought goes (arXiv 2506.01939; 0.2 there). The threshold is the
    (1 - quantile) quantile of all entropies, interpolated linearly; 0 keeps the largest.
    """
    on_BT = mask_BT.bool()
    sorted_N = entropy_BT[on_BT].float().sort().values
    if not len(sorted_N):
        return on_BT
    place = (1 - quantile) * (len(sorted_N) - 1)  # torch.quantile refuses more than 16 M numbers
    below = int(place)
    above = min(below + 1, len(sorted_N) - 1)
    threshold = torch.lerp(sorted_N[below], sorted_N[above], place - below)
    return on_BT & (entropy_BT.float() >= threshold)
