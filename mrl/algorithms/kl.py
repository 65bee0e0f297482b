"""KL divergence to the reference model, estimated on the sampled tokens.

Estimators: Schulman, "Approximating KL divergence" (2020). With d = log π_ref - log π of a sampled token, k1 = -d is
unbiased and may be negative; k2 = d²/2 is biased and never negative; k3 = exp(d) - 1 - d is both unbiased and never
negative.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3"]


def estimate_kl(logprobs_BT: Tensor, ref_logprobs_BT: Tensor, estimator: KLEstimator) -> Tensor:
    """KL(π || π_ref) at each token, in nats; B×T."""
    if estimator == "k1":
        return logprobs_BT - ref_logprobs_BT
    if estimator == "k2":
        return 0.5 * (logprobs_BT - ref_logprobs_BT) ** 2
    return kl_k3(logprobs_BT, ref_logprobs_BT)


def kl_k3(logprobs_BT: Tensor, ref_logprobs_BT: Tensor) -> Tensor:
    """The k3 estimator of KL(π || π_ref), as in GRPO (arXiv 2402.03300, eq. 4): unbiased and never negative; B×T."""
    log_ratio_BT = ref_logprobs_BT - logprobs_BT
    return torch.expm1(log_ratio_BT) - log_ratio_BT
