"""REINFORCE: the plain policy gradient (Williams, 1992, eq. 4-5), summed over a sequence and averaged over sequences.

That is the unbiased gradient of the expected reward when A is unscaled. There is no ratio or clip against off-policy
drift, so a batch allows one update.
"""

from __future__ import annotations

from mrl.algorithms.base import Loss, LossSettings, LossTerms, PolicyLoss


def reinforce(terms: LossTerms, settings: LossSettings) -> PolicyLoss:
    """-A log π; B×T."""
    return PolicyLoss(-terms.advantages_BT * terms.logprobs_BT)


REINFORCE = Loss(reinforce, normalization="sequence_sums", reuse=False)
