"""KL divergence to the reference model, estimated on the sampled tokens.

Estimators: Schulman, "Approximating KL divergence" (2020).
"""

from __future__ import annotations

import torch
from torch import Tensor


def kl_k3(logprobs_BT: Tensor, ref_logprobs_BT: Tensor) -> Tensor:
    """The k3 estimator of KL(π || π_ref), as in GRPO (arXiv 2402.03300, eq. 4): unbiased and never negative; B×T."""
    log_ratio_BT = ref_logprobs_BT - logprobs_BT
    return torch.expm1(log_ratio_BT) - log_ratio_BT
