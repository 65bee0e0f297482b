"""GDPO: each reward function is normalised by itself before they are added (arXiv 2601.05242).

If rewards are summed first, different combinations with equal sums get equal advantages, and the function with the
largest spread dominates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.algorithms.advantages.base import Advantage, AdvantageInputs, AdvantageSettings, standardize
from mrl.algorithms.advantages.group import group_advantages


def gdpo(inputs: AdvantageInputs, settings: AdvantageSettings) -> Tensor:
    """Σ_k w_k (r_k - group's mean of r_k) / group's standard deviation of r_k, standardised over the batch.

    A function that does not apply to a rollout (NaN) adds nothing there and is left out of its group's mean.
    """
    sums_B = torch.zeros_like(inputs.rewards_B)
    for rewards_B, weight in zip(inputs.rewards_BK.unbind(dim=1), inputs.weights_K, strict=True):
        applies_B = ~rewards_B.isnan()
        sums_B[applies_B] += weight * group_advantages(rewards_B[applies_B], inputs.groups_B[applies_B], "group")
    return standardize(sums_B)


GDPO = Advantage(gdpo, reads="rewards")
