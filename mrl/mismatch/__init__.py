"""Sampler against trainer: how far apart they are, why, and what corrects for it.

The same policy is computed twice: by the engine that samples and by the actor that trains. They differ in kernels and
precision, and in top-p, top-k and min-p, which the trainer does not apply. How far they are apart is the logprob gap:
|log π_sampler - log π_trainer| of the sampled tokens, in nats per token. Two things are done about it:

- What is to be expected is weighed. Each token's, or sequence's, part of the loss is multiplied by π_trainer /
  π_sampler within bounds (`correction`; `importance_sampling` and its options).
- What is not is a mistake somewhere: a sync that was missed, another temperature than asked for, 8-bit weights. A step
  whose gap is above `max_logprob_gap` is warned of with its likely causes, a second one in a row ends the run.

A step, from the two that use it:

    actor   probe.begin       picks the tokens that can be compared: those sampled by the very weights it holds
            importance_…      weighs them in the loss
            probe.examine     before the first update; if the gap is too large, tries what would explain it: `evidence`
            probe.end         the weights move on
            probe.published   on the way to the samplers: remembers what this version says of two known sequences
    loop    watch.look        fetches the evidence, has each sampler score the known sequences, and names the causes
            watch.stop        ends the run where that was the second such step

    correction.py   importance weights, and the part of a gap that top-p and its like explain
    probe.py        the actor's side
    watch.py        the loop's side
    causes.py       from evidence to causes, in words
"""

from mrl.mismatch.correction import importance_weights, log_importance, unexplained_gap, weighed_once
from mrl.mismatch.probe import Comparison, MismatchEvidence, MismatchProbe
from mrl.mismatch.watch import MismatchWatch

__all__ = [
    "Comparison",
    "MismatchEvidence",
    "MismatchProbe",
    "MismatchWatch",
    "importance_weights",
    "log_importance",
    "unexplained_gap",
    "weighed_once",
]
