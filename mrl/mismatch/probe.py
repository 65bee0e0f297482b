"""The actor's side of the check on sampler and trainer: which tokens to compare, and evidence when they are apart.

Like is compared with like: tokens count where their policy version is the one the actor holds, which is so from a
publish to the next update. Where a step has none, because generation runs ahead of it, those of the newest version
among them count, less what the weights have moved since. When they are too far apart, some of them are scored again,
with all their logits, under other temperatures and cuts and in the other precision. And so that a worker can be asked
which weights it really has, the actor scores two short sequences with every version it publishes and remembers the
numbers; how far two versions are apart is read off these too.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field, replace
from itertools import accumulate
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from mrl.algorithms.sampler_fits import Evidence, Fit, fit_cut, fit_temperature
from mrl.mismatch.correction import unexplained_gap
from mrl.modeling.forward import Forward, evaluating
from mrl.modeling.rows import Rows, make_rows, versions_of
from mrl.types import Sample, TrainBatch

PROBE_SAMPLES, PROBE_CONTEXT, PROBE_TOKENS = 2, 32, 32
"""Sequences that every version scores, and how much of each prompt and completion: 128 tokens, once a publish."""
KEPT_VERSIONS = 64
"""Of which it is remembered what they gave, beside the first of all."""
EXAMINED_SAMPLES, EXAMINED_TOKENS = 8, 128
"""Samples that are scored again, those furthest apart, and how many of their tokens at most; all logits of these are in
memory (128 x 151,936 words: 80 MB, and some copies)."""
MOVED = 2.0
"""What the weights moved since older tokens were sampled counts so many times: it is read off the sequences that every
version scores, and those that are trained on may move more."""


@dataclass(frozen=True)
class Comparison:
    """Which of a step's tokens are compared with the trainer."""

    version: int | None = None
    """Those that these weights have sampled; None = none."""
    moved: float = 0.0
    """Above 0 for weights older than the trainer's: what their distance may explain of a gap, in nats per token."""


@dataclass
class MismatchEvidence:
    """What the actor can say of a step whose gap is too large. Plain data."""

    gap: float
    """Mean |log π_sampler - log π| over the examined tokens, the configured cut taken into account, in nats."""
    signed_gap: float
    """The same without the absolute value; above 0: the sampler thinks its tokens likelier."""
    tokens: int
    temperature: Fit
    cut: Fit
    rounding: float
    """Mean difference between the actor's own logprobs in its precision and in the other one (float32, bfloat16)."""
    dtype: str
    """The actor's precision."""
    moved: float = 0.0
    """What the weights may have moved since these tokens were sampled, in nats per token; 0 = they have not."""
    probe: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """Prompt and completion ids of the sequences that every version has scored."""
    scores: dict[int, list[float]] = field(default_factory=dict)
    """Their logprobs at temperature 1, one after the other, by version."""


class MismatchProbe:
    """Belongs to one actor. limit: `max_logprob_gap`; None = nothing is compared or kept.

    version: of the weights as they were published last; None once they have moved on.
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
        """The weights as they are now are what samplers will call `version`. shared: they use the very module, so no
        update can be missed, and what they say of a version changes with each step."""
        self.version, self.shared = version, shared
        self._score(model)

    def begin(self, model: Any, samples: list[Sample]) -> Comparison:
        """A step begins. Returns what of it to compare."""
        self.evidence = None
        self.due = self.limit is not None
        if self.due and not self.probe and self.version is not None:
            self.probe = [_short(s) for s in samples if _all_sampled(s)][:PROBE_SAMPLES]
            self._score(model)
        self.comparison = self._comparison(samples)
        return self.comparison

    def examine(self, model: Any, parts: list[Rows], gap: float | None) -> None:
        """Once a step, before its first update: keep evidence if the gap is too large."""
        if not self.due:
            return
        self.due = False
        # A gap that is not a number means that a model has broken down, and the update is skipped for it.
        if gap is not None and self.limit is not None and gap > self.limit:
            self.evidence = self._evidence(model, parts)

    def end(self) -> None:
        """The step is over: the weights are no longer those that were published."""
        self.version = None

    def state(self) -> dict[str, Any]:
        """What a resumed run goes on from; plain data."""
        probe = [[s.prompt_ids, s.completion_ids, s.logprobs] for s in self.probe]
        return {"probe": probe, "scores": {str(version): scores for version, scores in self.scores.items()}}

    def load_state(self, state: dict[str, Any]) -> None:
        """Know again what `state` knew."""
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
        rows = make_rows(_batch(self.probe, 1.0), self.forward.device)
        self.scores[self.version] = self._logprobs(self.forward, model, rows).tolist()
        for version in sorted(self.scores)[1:-KEPT_VERSIONS]:
            del self.scores[version]

    def _evidence(self, model: Any, parts: list[Rows]) -> MismatchEvidence:
        temperature, cut = parts[0].temperature, parts[0].cut
        samples = _furthest(parts)
        if not samples:
            return self._without_numbers(temperature)
        rows = make_rows(_batch(samples, temperature), self.forward.device)
        inside_BT = rows.mask_BT.bool()
        with torch.no_grad(), evaluating(model):
            logits_NV = self.forward.logits(model, rows)
        tokens = Evidence(logits_NV, rows.completion_BT[inside_BT], rows.sampler_logprobs_BT[inside_BT])
        signed_N = tokens.sampler_N - tokens.logprobs(temperature, cut)
        other = copy.copy(self.forward)
        other.autocast_dtype = torch.bfloat16 if self.forward.autocast_dtype is None else None
        rounded_N = self._logprobs(other, model, rows) - self._logprobs(self.forward, model, rows)
        return MismatchEvidence(
            gap=signed_N.abs().mean().item(),
            signed_gap=signed_N.mean().item(),
            tokens=signed_N.numel(),
            temperature=fit_temperature(tokens, temperature, cut),
            cut=fit_cut(tokens, temperature, cut),
            rounding=rounded_N.abs().mean().item(),
            dtype=str(self.forward.autocast_dtype or torch.float32).removeprefix("torch."),
            moved=self.comparison.moved,
            probe=[(s.prompt_ids, s.completion_ids) for s in self.probe],
            scores=dict(self.scores),
        )

    def _without_numbers(self, temperature: float) -> MismatchEvidence:
        """The samplers' logprobs are all infinite: there is nothing to fit."""
        nothing = Fit("temperature", temperature, math.inf)
        return MismatchEvidence(math.inf, math.inf, 0, nothing, replace(nothing, name="top_p", value=1.0), 0.0, "")

    @torch.no_grad()
    def _logprobs(self, forward: Forward, model: Any, rows: Rows) -> Tensor:
        with evaluating(model):
            return forward.logprobs(model, rows, entropy=False)[0][rows.mask_BT.bool()]


def _furthest(parts: list[Rows]) -> list[Sample]:
    """The samples with the largest mean gap among tokens that may be compared; of each its first such tokens."""
    found: list[tuple[float, Sample]] = []
    for part in parts:
        assert part.compared_BT is not None
        assert part.old_logprobs_BT is not None
        gap_BT = unexplained_gap(part.old_logprobs_BT, part.sampler_logprobs_BT, part.cut.largest_gain)
        for sample, gap_T, compared_T in zip(part.samples, gap_BT, part.compared_BT, strict=True):
            if compared_T.any():
                mask = compared_T[: len(sample.completion_ids)].int().tolist()
                # A gap that is not finite comes first, and is left out of what is fitted.
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
    return replace(
        sample,
        completion_ids=sample.completion_ids[:end],
        mask=sample.mask[:end],
        logprobs=sample.logprobs[:end],
        reference_logprobs=None,
    )


def _all_sampled(sample: Sample) -> bool:
    return all(sample.mask[:PROBE_TOKENS])


def _short(sample: Sample) -> Sample:
    return _first(replace(sample, prompt_ids=sample.prompt_ids[-PROBE_CONTEXT:]), PROBE_TOKENS)


def _batch(samples: list[Sample], temperature: float) -> TrainBatch:
    return TrainBatch(samples, [0.0] * len(samples), len(samples), 1, temperature)
