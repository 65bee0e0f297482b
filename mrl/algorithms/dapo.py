"""DAPO: clipped surrogate, averaged over all tokens of the batch (arXiv 2503.14476, eq. 8).

Each token has the same weight, so a token of a long completion counts as much as any other. The paper clips
asymmetrically ("clip-higher": epsilon 0.2, epsilon_high 0.28).
"""

from mrl.algorithms.base import Loss
from mrl.algorithms.clipping import OPTIONS, clipped_surrogate

DAPO = Loss(clipped_surrogate, normalization="tokens", options=OPTIONS, levels=("token", "sequence"))
