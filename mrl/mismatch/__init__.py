"""Sampler/trainer mismatch: how large it is, why, and the importance weights that correct for it.

The same policy is computed twice: by the engine that samples and by the actor that trains. They differ in kernels and
precision, and in top-p, top-k and min-p, which the trainer does not apply. The logprob gap measures the difference:
|log π_sampler - log π_trainer| of the sampled tokens, in nats per token. Two things are done about it:

- The expected part is corrected. The loss of each token, or sequence, is multiplied by π_trainer / π_sampler within
  bounds (`correction`; `importance_sampling` and its options).
- The rest is a mistake somewhere: a missed sync, a wrong temperature, 8-bit weights. A step whose gap is above
  `max_logprob_gap` gives a warning with likely causes; a second one in a row ends the run.

Calls in a step, by the actor and by the training loop:

    actor   probe.begin       picks the tokens to compare: those sampled by the weights that the actor holds
            importance_…      weighs them in the loss
            probe.examine     before the first update; if the gap is too large, collects `evidence` for possible causes
            probe.end         the weights are about to change
            probe.published   when weights are published: scores two known sequences with this version
    loop    watch.look        fetches the evidence, has each sampler score the known sequences, and names the causes
            watch.stop        ends the run if that was the second such step in a row

    correction.py   importance weights, and the part of a gap that top-p, top-k and min-p explain
    probe.py        the actor's side
    watch.py        the training loop's side
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
