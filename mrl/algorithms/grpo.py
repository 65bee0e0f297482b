"""GRPO: clipped surrogate, averaged within each sequence, then over sequences (arXiv 2402.03300, eq. 3).

Each sequence counts the same, so a token of a long one counts less. The KL term of eq. 3 is `beta` (mrl.algorithms.kl).
"""

from mrl.algorithms.base import Loss
from mrl.algorithms.clipping import OPTIONS, clipped_surrogate

GRPO = Loss(clipped_surrogate, normalization="sequences", options=OPTIONS, levels=("token", "sequence"))
