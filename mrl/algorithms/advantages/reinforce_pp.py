"""REINFORCE++: one mean and one standard deviation for the whole batch (arXiv 2501.03262).

A group's own deviation is estimated from few rollouts and blows up groups that nearly agree; the batch's does not. The
plain form takes no baseline from the group, so a task that always succeeds is still reinforced; with the baseline the
group's mean is subtracted first, which the paper advises for several rollouts per task.
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


def reinforce_pp(inputs: AdvantageInputs, settings: AdvantageSettings) -> Tensor:
    """(r - mean of the batch) / standard deviation of the batch."""
    check_finite(inputs.rewards_B)
    return standardize(inputs.rewards_B)


def reinforce_pp_baseline(inputs: AdvantageInputs, settings: AdvantageSettings) -> Tensor:
    """r - mean of the group, standardised over the batch."""
    check_finite(inputs.rewards_B)
    return standardize(inputs.rewards_B - group_means(inputs.rewards_B, inputs.groups_B)[0])


REINFORCE_PP = Advantage(reinforce_pp, options=("discount",))
REINFORCE_PP_BASELINE = Advantage(reinforce_pp_baseline, options=("discount",))
