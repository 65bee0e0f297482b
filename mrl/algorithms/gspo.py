"""GSPO: the clipped surrogate of a whole sequence, averaged over sequences (arXiv 2507.18071, eq. 5 and 7).

The ratio is the geometric mean of its tokens' ratios, so the clip keeps or drops whole sequences. Such ratios lie far
closer to 1 than a token's: the paper clips at epsilon 3e-4 and epsilon_high 4e-4.
"""

from mrl.algorithms.base import Loss
from mrl.algorithms.clipping import OPTIONS, clipped_surrogate

# Every token of a sequence has the same loss, so the mean of each sequence's mean is the mean over sequences.
GSPO = Loss(clipped_surrogate, normalization="sequences", options=OPTIONS, levels=("sequence",))
