"""The actor's side of the mismatch check: which tokens to compare, and evidence when the gap is too large.

Only tokens of the policy version that the actor holds are compared; it holds a published version until the next update.
A step without such tokens (generation is off-policy by some versions) compares those of its newest version, and
subtracts what the weights may have moved the logprobs since. When the gap is too large, some tokens are scored again
with all their logits, under other temperatures and filters and in the other precision. The actor also scores two short
sequences with every version it publishes. These scores tell which weights a worker really has, and how far two versions
are apart.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import accumulate
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mrl.algorithms.sampling_estimates import SamplingEstimate, ScoredTokens, estimate_filter, estimate_temperature
from mrl.mismatch.correction import unexplained_gap
from mrl.modeling.evaluating import evaluating
from mrl.modeling.token_batch import TokenBatch, make_token_batch, versions_of
from mrl.types import Sample, TrainBatch

if TYPE_CHECKING:
    from mrl.modeling.forward import Forward

PROBE_SAMPLES, PROBE_CONTEXT, PROBE_TOKENS = 2, 32, 32
"""Sequences that every version scores, and the tokens of each prompt and completion: 128 tokens per publish."""
KEPT_VERSIONS = 64
"""Versions whose scores are kept, besides the first version's."""
EXAMINED_SAMPLES, EXAMINED_TOKENS = 8, 128
"""Samples that are scored again (those with the largest gaps), and their tokens in all. All logits of these are in
memory (128 x 151,936: 80 MB, and some copies)."""
MOVED = 2.0
"""Factor on the measured movement between two versions: it is measured on the known sequences, and those that are
trained on may move more."""


@dataclass(frozen=True)
class Comparison:
    """Which of a step's tokens are compared with the trainer."""

    version: int | None = None
    """Tokens sampled by this policy version; None = none."""
    moved: float = 0.0
    """For a version older than the trainer's: the gap that the updates since may explain, in nats per token."""


@dataclass
class MismatchEvidence:
    """What the actor found out about a step whose gap is too large. Plain data."""

    gap: float
    """Mean |log π_sampler - log π| over the examined tokens, π under the configured filter, in nats."""
    signed_gap: float
    """The same without the absolute value; above 0: the sampler gives its tokens a higher probability."""
    tokens: int
    temperature: SamplingEstimate
    sampling_filter: SamplingEstimate
    rounding: float
    """Mean difference between the actor's own logprobs in its precision and in the other one (float32, bfloat16);
    0 where it cannot compute in both."""
    dtype: str
    """The actor's precision."""
    moved: float = 0.0
    """`Comparison.moved`; 0 = the tokens are from the trainer's own version."""
    probe: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """Prompt and completion ids of the known sequences, which every version has scored."""
    scores: dict[int, list[float]] = field(default_factory=dict)
    """By version: their logprobs at temperature 1, concatenated."""


class MismatchProbe:
    """Belongs to one actor. limit: `max_logprob_gap`; None = nothing is compared or kept.

    version: the published version that the actor's weights are; None once an update has changed them.
    """

    def __init__(self, forward: Forward, limit: float | None) -> None:
        self.forward, self.limit = forward, limit
        self.version: int | None = None
        self.evidence: MismatchEvidence | None = None
        self.probe: list[Sample] = []
        self.scores: dict[int, list[float]] = {}
        self.comparison = Comparison()
        self.due = False
        self.shared = False

    def published(self, model: Any, version: int, *, shared: bool = False) -> None:
        """The current weights were published as `version`. shared: samplers use the actor's module itself, so no sync
        can be missed, and the scores of a version would change with each step."""
        self.version, self.shared = version, shared
        self._score(model)

    def begin(self, model: Any, samples: list[Sample]) -> Comparison:
        """A step begins. Returns which of its tokens to compare."""
        self.evidence = None
        self.due = self.limit is not None
        if self.due and not self.probe and self.version is not None:
            self.probe = [_short(s) for s in samples if _all_sampled(s)][:PROBE_SAMPLES]
            self._score(model)
        self.comparison = self._comparison(samples)
        return self.comparison

    def examine(self, model: Any, parts: Callable[[], list[TokenBatch]], gap: float | None) -> None:
        """Once a step, before its first update: keep evidence if the gap is too large. parts: of all samples; called
        then only."""
        if not self.due:
            return
        self.due = False
        # A NaN gap means that the model has broken down; the update is skipped anyway.
        if gap is not None and self.limit is not None and gap > self.limit:
            self.evidence = self._evidence(model, parts())

    def end(self) -> None:
        """The step is over: the weights are no longer the published ones."""
        self.version = None

    def state(self) -> dict[str, Any]:
        """For a checkpoint; plain data."""
        probe = [[s.prompt_ids, s.completion_ids, s.logprobs] for s in self.probe]
        return {"probe": probe, "scores": {str(version): scores for version, scores in self.scores.items()}}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self.probe = [Sample(prompt, ids, logprobs, [1] * len(ids), 0) for prompt, ids, logprobs in state["probe"]]
        self.scores = {int(version): scores for version, scores in state["scores"].items()}

    # --- inner ------------------------------------------------------------------------------------------------------

    def _comparison(self, samples: list[Sample]) -> Comparison:
        present = {version for sample in samples for version in versions_of(sample)}
        newest = max(present, default=None)
        if self.version is None or newest is None or newest >= self.version:
            return Comparison(self.version)
        if newest not in self.scores or self.version not in self.scores:
            return Comparison()
        pairs = zip(self.scores[newest], self.scores[self.version], strict=True)
        moved = fmean(abs(a - b) for a, b in pairs)
        return Comparison(newest, MOVED * moved) if math.isfinite(moved) else Comparison()

    def _score(self, model: Any) -> None:
        if self.limit is None or not self.probe or self.version is None or self.shared:
            return
        tokens = make_token_batch(_batch(self.probe, 1.0), self.forward.device)
        self.scores[self.version] = self._logprobs(self.forward, model, tokens).tolist()
        for version in sorted(self.scores)[1:-KEPT_VERSIONS]:
            del self.scores[version]

    def _evidence(self, model: Any, parts: list[TokenBatch]) -> MismatchEvidence:
        temperature, sampling_filter = parts[0].temperature, parts[0].sampling_filter
        samples = _furthest(parts)
        if not samples:
            return self._without_numbers(temperature)
        tokens = make_token_batch(_batch(samples, temperature), self.forward.device)
        inside_BT = tokens.mask_BT.bool()
        with torch.no_grad(), evaluating(model):
            logits_NV = self.forward.logits(model, tokens)
        scored = ScoredTokens(logits_NV, tokens.completion_BT[inside_BT], tokens.sampler_logprobs_BT[inside_BT])
        signed_N = scored.sampler_N - scored.logprobs(temperature, sampling_filter)
        return MismatchEvidence(
            gap=signed_N.abs().mean().item(),
            signed_gap=signed_N.mean().item(),
            tokens=signed_N.numel(),
            temperature=estimate_temperature(scored, temperature, sampling_filter),
            sampling_filter=estimate_filter(scored, temperature, sampling_filter),
            rounding=self._rounding(model, tokens),
            dtype=str(self.forward.autocast_dtype or torch.float32).removeprefix("torch."),
            moved=self.comparison.moved,
            probe=[(s.prompt_ids, s.completion_ids) for s in self.probe],
            scores=dict(self.scores),
        )

    def _rounding(self, model: Any, tokens: TokenBatch) -> float:
        """`MismatchEvidence.rounding`."""
        if not self.forward.other_precision:
            return 0.0
        other = copy.copy(self.forward)
        other.autocast_dtype = torch.bfloat16 if self.forward.autocast_dtype is None else None
        rounded_N = self._logprobs(other, model, tokens) - self._logprobs(self.forward, model, tokens)
        return rounded_N.abs().mean().item()

    def _without_numbers(self, temperature: float) -> MismatchEvidence:
        """For samplers whose logprobs are all infinite: there is nothing to estimate from."""
        nothing = SamplingEstimate("temperature", temperature, math.inf)
        return MismatchEvidence(math.inf, math.inf, 0, nothing, replace(nothing, name="top_p", value=1.0), 0.0, "")

    @torch.no_grad()
    def _logprobs(self, forward: Forward, model: Any, tokens: TokenBatch) -> Tensor:
        with evaluating(model):
            return forward.logprobs(model, tokens, entropy=False)[0][tokens.mask_BT.bool()]


def _furthest(parts: list[TokenBatch]) -> list[Sample]:
    """The samples with the largest mean gap over compared tokens; of each its first such tokens."""
    found: list[tuple[float, Sample]] = []
    for part in parts:
        assert part.compared_BT is not None
        assert part.old_logprobs_BT is not None
        gap_BT = unexplained_gap(part.old_logprobs_BT, part.sampler_logprobs_BT, part.sampling_filter.largest_gain)
        for sample, gap_T, compared_T in zip(part.samples, gap_BT, part.compared_BT, strict=True):
            if compared_T.any():
                mask = compared_T[: len(sample.completion_ids)].int().tolist()
                # Samples with a gap that is not finite come first; the tokens themselves are left out.
                worst = gap_T[compared_T].mean().nan_to_num(torch.inf).item()
                finite = [int(m and math.isfinite(p)) for m, p in zip(mask, sample.logprobs, strict=True)]
                if any(finite):
                    found.append((worst, replace(sample, mask=finite)))
    found.sort(key=lambda pair: -pair[0])
    each = EXAMINED_TOKENS // EXAMINED_SAMPLES
    return [_first(sample, each) for _, sample in found[:EXAMINED_SAMPLES]]


def _first(sample: Sample, tokens: int) -> Sample:
    """The sample up to its `tokens`-th sampled token."""
    end = next((i + 1 for i, count in enumerate(accumulate(sample.mask)) if count == tokens), len(sample.mask))
    whole = len(sample.prompt_ids) + end
    return replace(
        sample,
        media=tuple(image for image in sample.media if image.start + image.length <= whole),
        completion_ids=sample.completion_ids[:end],
        mask=sample.mask[:end],
        logprobs=sample.logprobs[:end],
        reference_logprobs=None,
    )


def _all_sampled(sample: Sample) -> bool:
    return all(sample.mask[:PROBE_TOKENS])


def _short(sample: Sample) -> Sample:
    # Without its images: the same ids are scored by every version, whatever they say.
    return _first(replace(sample, prompt_ids=sample.prompt_ids[-PROBE_CONTEXT:], media=()), PROBE_TOKENS)


def _batch(samples: list[Sample], temperature: float) -> TrainBatch:
    return TrainBatch(samples, [0.0] * len(samples), len(samples), 1, temperature)
