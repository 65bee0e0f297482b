"""Why sampler and trainer are apart: temperature, top-p and its like, dtype or a missed sync.

- A missed sync: the worker scores known sequences as another version than it says it serves.
- Temperature, or a cut: under another one, the sampler's logprobs are the trainer's.
- Dtype: differences without direction, as large as bfloat16 makes them on the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from mrl.algorithms.sampler_fits import Fit
from mrl.config import GenerationConfig
from mrl.mismatch.probe import MismatchEvidence

EXPLAINS = 0.35
"""A temperature or a cut is named when at most this share of the gap is left under it."""
ROUNDING = 6.0
"""Gaps up to so many times the difference between float32 and bfloat16 may be rounding: kernels differ too, and the
samples that are looked at are those furthest apart."""
AGREES = 1e-3
"""Nats per token up to which two float32 engines are the same."""


@dataclass
class WorkerView:
    """What one rollout worker says of the sequences that every version was scored on."""

    name: str
    version: int | None = None
    """The one it says it serves."""
    logprobs: list[float] | None = None
    """At temperature 1; None = it could not say."""
    dtype: str | None = None


@dataclass
class Cause:
    """One likely reason for a gap. kind: temperature, top-p, top-k, min-p, dtype or missed sync."""

    kind: str
    text: str


def find_causes(evidence: MismatchEvidence, views: Sequence[WorkerView], asked: GenerationConfig) -> list[Cause]:
    """What explains the gap, the likeliest first; [] where nothing that was tried does.

    asked: how the samplers were told to sample. Weights come first, because moved weights may look a little like
    another temperature; rounding last, because it is what is left when nothing else fits.
    """
    weights = [cause for view in views if (cause := _other_weights(evidence, view)) is not None]
    found = weights + [_other_sampling(fit, evidence, asked) for fit in _fitting(evidence)]
    if found:
        return found
    rounding = _rounding(evidence, views)
    return [rounding] if rounding else []


def _other_weights(evidence: MismatchEvidence, view: WorkerView) -> Cause | None:
    """Whether the worker scores known sequences otherwise than the version does that it says it serves."""
    if view.logprobs is None or view.version not in evidence.scores:
        return None
    distances = {version: _distance(view.logprobs, scores) for version, scores in evidence.scores.items()}
    own, nearest = distances[view.version], min(distances, key=distances.__getitem__)
    if own > AGREES and distances[nearest] < EXPLAINS * own:
        seen = (
            f"scores known tokens as version {nearest} does ({distances[nearest]:.2g} nats apart, and {own:.2g} from "
        )
        seen += f"version {view.version})"
    elif own > max(AGREES, ROUNDING * evidence.rounding, EXPLAINS * evidence.gap):
        seen = f"scores known tokens {own:.2g} nats apart from it, and like none from {min(distances)} to "
        seen += f"{max(distances)}; it may have been started with another model or revision"
    else:
        return None
    return Cause(
        "missed sync",
        f"{view.name} says it serves version {view.version}, but {seen}. Look at the engine's log and at "
        "weight_sync_method, and start the engine anew",
    )


def _fitting(evidence: MismatchEvidence) -> list[Fit]:
    """The temperature and the cut that fit, the better one first; the other only where it fits about as well."""
    fits = sorted((evidence.temperature, evidence.cut), key=lambda fit: fit.residual)
    enough = min(EXPLAINS * evidence.gap, 3 * fits[0].residual + AGREES)
    return [fit for fit in fits if fit.residual <= enough and math.isfinite(enough)]


def _other_sampling(fit: Fit, evidence: MismatchEvidence, asked: GenerationConfig) -> Cause:
    explained = f"(explains {1 - fit.residual / evidence.gap:.0%} of the gap)"
    advice = f"Set {fit.name} to what the engine does, or change that: vllm_args, or a server's generation_config"
    value = getattr(asked, fit.name)
    if fit.name == "temperature":
        raw = ". 1 may also mean logprobs from before the temperature: --logprobs-mode has to be processed_logprobs"
        return Cause(
            "temperature",
            f"the sampler's logprobs are those of temperature {fit.value:.3g}, where temperature: {value:g} was asked "
            f"for {explained}. {advice}" + (raw if abs(fit.value - 1) < 0.02 else ""),
        )
    return Cause(
        fit.name.replace("_", "-"),
        f"the sampler cuts like {fit.name}: {fit.value:.3g}, where {value:g} was asked for {explained}. {advice}",
    )


def _rounding(evidence: MismatchEvidence, views: Sequence[WorkerView]) -> Cause | None:
    """Differences without direction, of the size that another precision makes."""
    if evidence.gap > ROUNDING * evidence.rounding or abs(evidence.signed_gap) > 0.7 * evidence.gap:
        return None
    engines = " and ".join(sorted({view.dtype for view in views if view.dtype}))
    where = f"the trainer computes in {evidence.dtype}" + (f", the engine in {engines}" if engines else "")
    return Cause(
        "dtype",
        f"the differences ({evidence.gap:.2g} nats, {evidence.signed_gap:+.2g} on the whole) have no direction and are "
        f"of the size that bfloat16 makes on these tokens ({evidence.rounding:.2g}); {where}. Give both the same "
        "dtype, or raise max_logprob_gap",
    )


def all_causes(evidence: MismatchEvidence, asked: GenerationConfig) -> list[Cause]:
    """Nothing fits: what to look at."""
    moved = Cause(
        "fast updates",
        f"these tokens are from older weights, and updates may have moved them by more than the {evidence.moved:.2g} "
        "nats that other sequences show. Lower learning_rate or max_staleness",
    )
    return ([moved] if evidence.moved else []) + [
        Cause(
            "missed sync", "no worker could be shown to have other weights; look at its log and its model's revision"
        ),
        Cause(
            "temperature",
            f"no other one than {asked.temperature:g} fits, but penalties, a logit bias or a grammar would show like "
            "this: look at vllm_args and at a server's generation_config",
        ),
        Cause("top-p", f"no other top_p than {asked.top_p:g}, top_k or min_p fits by itself; two at once might"),
        Cause("dtype", "this is more than bfloat16 makes; 8-bit weights, activations or keys may make it"),
    ]


def _distance(one: Sequence[float], other: Sequence[float]) -> float:
    return fmean(abs(a - b) for a, b in zip(one, other, strict=True))
