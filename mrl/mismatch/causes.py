"""Why sampler and trainer differ: temperature, top-p, top-k, min-p, dtype or a missed sync.

- Missed sync: the worker's scores of known sequences match another version than the one it claims to serve.
- Temperature or filter: with another value, the trainer's logprobs match the sampler's.
- Dtype: differences without bias, of the size that bfloat16 causes on the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from mrl.algorithms.sampling_estimates import SamplingEstimate
from mrl.config import GenerationConfig
from mrl.mismatch.probe import MismatchEvidence

EXPLAINS = 0.35
"""A temperature or filter is named when it leaves at most this share of the gap."""
ROUNDING = 6.0
"""Gaps up to this multiple of the float32/bfloat16 difference may be rounding: kernels differ too, and the samples
examined are those with the largest gaps."""
AGREES = 1e-3
"""Nats per token up to which two float32 engines count as equal."""


@dataclass
class WorkerView:
    """What one rollout worker reports: its version, and its logprobs of the known sequences."""

    name: str
    version: int | None = None
    """The version it claims to serve."""
    logprobs: list[float] | None = None
    """At temperature 1; None = it could not score."""
    dtype: str | None = None


@dataclass
class Cause:
    """One likely reason for a gap. kind: temperature, top-p, top-k, min-p, dtype or missed sync."""

    kind: str
    text: str


def find_causes(evidence: MismatchEvidence, views: Sequence[WorkerView], asked: GenerationConfig) -> list[Cause]:
    """Causes that explain the gap, most likely first; [] when none of those tried does.

    asked: the configured sampling options. Stale weights come first, because they may look a little like another
    temperature; rounding last, when nothing else fits.
    """
    weights = [cause for view in views if (cause := _other_weights(evidence, view)) is not None]
    found = weights + [_other_sampling(estimate, evidence, asked) for estimate in _fitting(evidence)]
    if found:
        return found
    rounding = _rounding(evidence, views)
    return [rounding] if rounding else []


def _other_weights(evidence: MismatchEvidence, view: WorkerView) -> Cause | None:
    """A cause if the worker's scores of known sequences differ from those of the version it claims to serve."""
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
        "weight_sync_method, and restart the engine",
    )


def _fitting(evidence: MismatchEvidence) -> list[SamplingEstimate]:
    """The estimated temperature or filter, the better fit first; both only where they fit about equally well, and none
    where there is nothing to explain, or no end of it."""
    estimates = sorted((evidence.temperature, evidence.sampling_filter), key=lambda estimate: estimate.residual)
    enough = min(EXPLAINS * evidence.gap, 3 * estimates[0].residual + AGREES)
    return [estimate for estimate in estimates if estimate.residual <= enough < evidence.gap]


def _other_sampling(estimate: SamplingEstimate, evidence: MismatchEvidence, asked: GenerationConfig) -> Cause:
    explained = f"(explains {1 - estimate.residual / evidence.gap:.0%} of the gap)"
    advice = f"Set {estimate.name} to what the engine does, or change that: vllm_args, or a server's generation_config"
    value = getattr(asked, estimate.name)
    if estimate.name == "temperature":
        raw = ". 1 may also mean logprobs from before the temperature: --logprobs-mode has to be processed_logprobs"
        return Cause(
            "temperature",
            f"the sampler's logprobs are those of temperature {estimate.value:.3g}, where temperature: {value:g} was "
            f"asked for {explained}. {advice}" + (raw if abs(estimate.value - 1) < 0.02 else ""),
        )
    return Cause(
        estimate.name.replace("_", "-"),
        f"the sampler filters like {estimate.name}: {estimate.value:.3g}, where {value:g} was asked for {explained}. "
        f"{advice}",
    )


def _rounding(evidence: MismatchEvidence, views: Sequence[WorkerView]) -> Cause | None:
    """A cause if the differences are unbiased and of the size that another precision makes."""
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
    """All possible causes with what to look at, for when none fits."""
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
