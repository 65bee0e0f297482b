"""BNPO: clipped surrogate, averaged over the tokens of the batch it was computed on.

In trainers that normalise each micro-batch separately this differs from DAPO and depends on the split. Here the weights
always come from the whole batch, so the result does not depend on the split and equals `dapo`. The name is kept so that
recipes written for TRL run (`loss_type="bnpo"`, one micro-batch: the same numbers).
"""

from mrl.algorithms.base import Loss
from mrl.algorithms.clipping import OPTIONS, clipped_surrogate

BNPO = Loss(clipped_surrogate, normalization="tokens", options=OPTIONS, levels=("token", "sequence"))
