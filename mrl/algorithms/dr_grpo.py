"""Dr. GRPO: clipped surrogate, summed and divided by a constant (arXiv 2503.20783, section 3.2).

The constant, sequences × `max_completion_length`, removes GRPO's bias towards long wrong completions. The paper also
leaves out the division by the group's standard deviation: `scale_rewards: none`.
"""

from mrl.algorithms.base import Loss
from mrl.algorithms.clipping import OPTIONS, clipped_surrogate

DR_GRPO = Loss(clipped_surrogate, normalization="max_length", options=OPTIONS, levels=("token", "sequence"))
