"""CISPO: the importance weight is clipped, not the update (MiniMax-M1, arXiv 2506.13585, eq. 4-5).

Every token keeps its gradient A ∇log π; the ratio only scales it, detached, and at most `epsilon_high`. As in ScaleRL
(arXiv 2510.13786) `epsilon_high` is the largest ratio itself, e.g. 5.0, and there is no lower clip.
"""

from __future__ import annotations

from mrl.algorithms.base import Loss, LossSettings, LossTerms, PolicyLoss
from mrl.algorithms.ratio import importance_ratio


def cispo(terms: LossTerms, settings: LossSettings) -> PolicyLoss:
    """-sg(min(r, ε_max)) A log π; B×T."""
    ratio_BT = importance_ratio(terms, settings.level).detach()
    loss_BT = -ratio_BT.clamp(max=settings.epsilon_high) * terms.advantages_BT * terms.logprobs_BT
    return PolicyLoss(
        loss_BT,
        ratio_BT,
        clipped_high_BT=(ratio_BT > settings.epsilon_high) & (terms.advantages_BT > 0),
    )


CISPO = Loss(
    cispo,
    normalization="tokens",
    options=("epsilon_high", "importance_sampling_level"),
    levels=("token", "sequence"),
)
