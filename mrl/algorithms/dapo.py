"""DAPO: clipped surrogate, averaged over all tokens of the batch (arXiv 2503.14476, eq. 8).

Each token counts the same, so long completions are not favoured when wrong nor slighted when right. The paper clips
asymmetrically ("clip-higher": epsilon 0.2, epsilon_high 0.28).
"""

from mrl.algorithms.base import Loss
from mrl.algorithms.clipping import OPTIONS, clipped_surrogate

DAPO = Loss(clipped_surrogate, normalization="tokens", options=OPTIONS, levels=("token", "sequence"))
