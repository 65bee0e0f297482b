"""VESPO: a sequence's importance weight, shaped by a smooth function instead of clipped (arXiv 2602.10693).

w is the ratio of trained policy to sampler for the whole sequence, not a geometric mean; so the sampler/trainer
correction is a factor of w and not of the loss. φ(w) = w^k exp(λ (1 - w)) is 1 at w = 1 and falls to 0 on both sides.
Like CISPO's weight it scales the gradient and has none itself.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mrl.algorithms.base import Loss, LossSettings, LossTerms, PolicyLoss
from mrl.algorithms.ratio import importance_ratio

LOG_MOST = 20.0
LOG_LEAST = math.log(1e-8)
"""Log-ratios of tokens and of sequences are clamped to these: exp() stays finite, and φ is 0 long before."""
LEAST_LAMBDA = 1e-4


def vespo(terms: LossTerms, settings: LossSettings) -> PolicyLoss:
    """-sg(φ(w)) A log π with k and λ chosen by the sign of A; B×T."""
    log_w_B1 = _sequence_log_weight(terms)
    positive_BT = terms.advantages_BT >= 0
    k_BT = torch.where(positive_BT, settings.vespo_k_pos, settings.vespo_k_neg)
    lambda_BT = torch.where(positive_BT, settings.vespo_lambda_pos, settings.vespo_lambda_neg).clamp(min=LEAST_LAMBDA)
    phi_BT = torch.exp(lambda_BT + k_BT * log_w_B1 - lambda_BT * log_w_B1.exp())
    loss_BT = -phi_BT * terms.advantages_BT * terms.logprobs_BT
    return PolicyLoss(loss_BT, importance_ratio(terms, "token").detach())


@torch.no_grad()
def _sequence_log_weight(terms: LossTerms) -> Tensor:
    mask_BT = terms.mask_BT.bool()
    log_ratio_BT = (terms.logprobs_BT - terms.old_logprobs_BT).clamp(-LOG_MOST, LOG_MOST)
    log_w_B1 = torch.where(mask_BT, log_ratio_BT, 0.0).sum(dim=1, keepdim=True)
    if terms.correction_BT is not None:
        log_correction_BT = terms.correction_BT.log().clamp(LOG_LEAST, LOG_MOST)
        log_w_B1 = log_w_B1 + torch.where(mask_BT, log_correction_BT, 0.0).sum(dim=1, keepdim=True)
    return log_w_B1.clamp(LOG_LEAST, LOG_MOST)


VESPO = Loss(
    vespo,
    normalization="tokens",
    options=("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
    corrects=True,
)
