"""LUSPO: GSPO with each sequence's loss multiplied by its length (arXiv 2602.05261).

GSPO gives every sequence the same weight, so a token of a long one counts less and answers get shorter. Multiplied by
the length, every token counts the same.
"""

from mrl.algorithms.base import Loss
from mrl.algorithms.clipping import OPTIONS, clipped_surrogate

# All tokens of a sequence have the same loss, so their sum is that loss times the length.
LUSPO = Loss(clipped_surrogate, normalization="sequence_sums", options=OPTIONS, levels=("sequence", "token"))
