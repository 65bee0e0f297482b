"""RLOO: the mean of the others is the baseline (arXiv 2402.14740).

Unlike the group's own mean it does not contain the rollout it is subtracted from, so the gradient is unbiased. It is
n/(n-1) times the mean-centred reward.
"""

from __future__ import annotations

from torch import Tensor

from mrl.algorithms.advantages.base import (
    Advantage,
    AdvantageInputs,
    AdvantageSettings,
    check_finite,
    group_means,
    standardize,
)


def rloo(inputs: AdvantageInputs, settings: AdvantageSettings) -> Tensor:
    """r - mean of the group's other rewards; standardised over the batch where `normalize`. 0 in a group of one."""
    check_finite(inputs.rewards_B)
    means_B, counts_B = group_means(inputs.rewards_B, inputs.groups_B)
    advantages_B = (inputs.rewards_B - means_B) * counts_B / (counts_B - 1).clamp(min=1)
    return standardize(advantages_B) if settings.normalize else advantages_B


RLOO = Advantage(rloo, options=("normalize_advantages", "discount"))
