"""MaxRL: maximises the log-likelihood of success instead of the expected reward (arXiv 2602.02710).

∇ log p(success) = ∇p / p: dividing by the group's mean, an estimate of p, weighs hard tasks more. Made for rewards of 0
and 1, where it is the average score of the successes minus the average score of all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.algorithms.advantages.base import (
    Advantage,
    AdvantageInputs,
    AdvantageSettings,
    check_finite,
    group_means,
)


def maxrl(inputs: AdvantageInputs, settings: AdvantageSettings) -> Tensor:
    """(r - mean of the group) / mean of the group; 0 in a group without success. Raises ValueError for r < 0."""
    check_finite(inputs.rewards_B)
    if (inputs.rewards_B < 0).any():
        raise ValueError(f"maxrl takes rewards of at least 0, found {inputs.rewards_B.min().item():g}")
    means_B, _ = group_means(inputs.rewards_B, inputs.groups_B)
    return torch.where(means_B > 0, (inputs.rewards_B - means_B) / means_B.clamp(min=1e-12), 0.0)


MAXRL = Advantage(maxrl, options=("discount",), takes_negative=False)
