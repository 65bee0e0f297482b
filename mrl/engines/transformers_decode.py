"""The decode loop of the `transformers` engine: waves of requests, shared prefill, one token per row and step.

A wave is a set of requests decoded together. Its prompts are left-padded, so all rows write the same cache column at
every step; each distinct prompt is computed once and its cache rows are then copied to the requests that share it.
Rows that ended are dropped when a quarter of the rows did.

Left out: refilling freed rows from the queue. `_Wave` is where it would go: `step` already handles rows independently.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from mrl.engines.kv_cache import GrowingCache, select_rows
from mrl.engines.sampling import RowParams, sample
from mrl.engines.stop_strings import StopStrings
from mrl.engines.transformers_model import CausalLM
from mrl.errors import EngineError
from mrl.types import Completion, FinishReason, GenerateRequest

COMPACT_SHARE = 0.25
"""Finished rows are dropped when they are this share of the wave: copying the cache must pay."""

STEPS_PER_CHECK = {"cpu": 1, "cuda": 4, "mps": 4}
"""How often the host looks which rows ended, by device: on an accelerator, looking waits for it."""

FIRST_ROOM = 256
"""Tokens a cache has room for at first beyond the prompt; it grows by half when they are used up."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what is in memory at once."""

    max_model_len: int
    """Prompt and completion tokens of one request."""
    max_batch_tokens: int
    """Rows x longest possible length of a wave."""
    max_rows: int
    """Rows of a wave; each has logits over the whole vocabulary."""
    prefill_tokens: int
    """Prompts x longest prompt of one prefill forward."""


@dataclass(frozen=True, slots=True)
class _Job:
    """A request with its place in the caller's list and the tokens it may sample."""

    index: int
    request: GenerateRequest
    max_new: int


def decode(
    lm: CausalLM,
    requests: Sequence[GenerateRequest],
    *,
    limits: Limits,
    eos_ids: frozenset[int],
    tokenizer: PreTrainedTokenizerBase | None,
    version: int,
    stopping: threading.Event,
) -> list[Completion]:
    """A completion per request, in their order. `stopping` set from another thread ends it with EngineError."""
    completions: list[Completion | None] = [None] * len(requests)
    for jobs in plan_waves(requests, limits, one_prefill=not lm.plain_attention):
        jobs.sort(key=lambda job: len(job.request.prompt_ids))
        wave = _Wave(lm, jobs, limits, eos_ids, tokenizer)
        wave.run(stopping)
        for job, completion in zip(jobs, wave.completions(version), strict=True):
            completions[job.index] = completion
    return [c for c in completions if c is not None]


def plan_waves(requests: Sequence[GenerateRequest], limits: Limits, *, one_prefill: bool) -> Iterator[list[_Job]]:
    """Split requests into waves within `limits`, requests with equal prompts adjacent and, if they fit, together.

    one_prefill: the wave's distinct prompts must also fit one prefill forward (caches that cannot be merged).
    """
    wave: list[_Job] = []
    size = _Size()
    for jobs in _by_prompt(requests, limits.max_model_len):
        grown = size.plus(jobs, new_prompt=True)
        if wave and not grown.fits(limits, one_prefill):
            yield wave
            wave, size = [], _Size()
        for number, job in enumerate(jobs):
            grown = size.plus([job], new_prompt=number == 0 or not wave)
            if wave and not grown.fits(limits, one_prefill):
                # The group is larger than a wave: it is split, and its prompt computed once in each part.
                yield wave
                wave, grown = [], _Size().plus([job], new_prompt=True)
            wave.append(job)
            size = grown
    if wave:
        yield wave


def _by_prompt(requests: Sequence[GenerateRequest], max_model_len: int) -> list[list[_Job]]:
    groups: dict[tuple[int, ...], list[_Job]] = {}
    for index, r in enumerate(requests):
        job = _Job(index, r, min(r.sampling.max_tokens, max_model_len - len(r.prompt_ids)))
        groups.setdefault(r.prompt_ids, []).append(job)
    return list(groups.values())


@dataclass(frozen=True, slots=True)
class _Size:
    """What a wave would take."""

    rows: int = 0
    prompts: int = 0
    longest_prompt: int = 0
    longest_completion: int = 0

    def plus(self, jobs: list[_Job], *, new_prompt: bool) -> _Size:
        """With jobs of one prompt added."""
        return _Size(
            self.rows + len(jobs),
            self.prompts + new_prompt,
            max(self.longest_prompt, len(jobs[0].request.prompt_ids)),
            max(self.longest_completion, *(job.max_new for job in jobs)),
        )

    def fits(self, limits: Limits, one_prefill: bool) -> bool:
        return (
            self.rows <= limits.max_rows
            and self.rows * (self.longest_prompt + self.longest_completion) <= limits.max_batch_tokens
            and not (one_prefill and self.prompts * self.longest_prompt > limits.prefill_tokens)
        )


class _Wave:
    """N requests decoded together. Suffixes: N requests, B rows still in the batch, P distinct prompts, S stop ids."""

    def __init__(
        self,
        lm: CausalLM,
        jobs: list[_Job],
        limits: Limits,
        eos_ids: frozenset[int],
        tokenizer: PreTrainedTokenizerBase | None,
    ) -> None:
        device = lm.device
        self.lm, self.jobs, self.limits, self.device = lm, jobs, limits, device
        rows, max_new = len(jobs), max(j.max_new for j in jobs)
        samplings = [j.request.sampling for j in jobs]

        self.ids_NT = torch.zeros(rows, max_new, dtype=torch.int64, device=device)
        self.logprobs_NT = torch.zeros(rows, max_new, dtype=torch.float32, device=device)
        self.length_N = torch.tensor([j.max_new for j in jobs], device=device)
        self.stopped_N = torch.zeros(rows, dtype=torch.bool, device=device)

        self.row_B = torch.arange(rows, device=device)
        self.params = RowParams.build(samplings, [j.request.seed for j in jobs], device)
        self.stop_ids_BS = _stop_table([eos_ids.union(s.stop_token_ids) for s in samplings], device)
        self.max_new_B = self.length_N.clone()
        self.done_B = torch.zeros(rows, dtype=torch.bool, device=device)
        self.bad_B = torch.zeros(rows, dtype=torch.bool, device=device)
        self.stop_strings = StopStrings([s.stop for s in samplings], tokenizer)
        self.steps_per_check = 1 if self.stop_strings.any else STEPS_PER_CHECK.get(device.type, 4)

    def run(self, stopping: threading.Event) -> None:
        """Sample until every row ended."""
        logits_BV, cache, mask_BL, prompt_len_B = prefill(self.lm, self.jobs, self.limits)
        columns = cache.get_seq_length()
        for step in range(self.ids_NT.shape[1]):
            if stopping.is_set():
                raise EngineError("generation was abandoned: its caller was cancelled, or the engine closed")
            token_B = self.take_token(logits_BV, step)
            if (step + 1) % self.steps_per_check == 0:
                self.check_finite()
                kept_B = self.drop_finished()
                if kept_B is not None:
                    if not len(kept_B):
                        return
                    select_rows(cache, kept_B)
                    token_B, prompt_len_B = token_B[kept_B], prompt_len_B[kept_B]
                    mask_BL = None if mask_BL is None else mask_BL[kept_B]
            if step + 1 < self.ids_NT.shape[1]:
                # A row that ended but was not dropped yet runs along; its position must stay one the model has.
                position_B1 = (prompt_len_B + step).clamp(max=self.limits.max_model_len - 1)[:, None]
                seen_BL = None if mask_BL is None else mask_BL[:, : columns + step + 1]
                logits_BV = self.lm.forward(token_B[:, None], position_B1, seen_BL, cache, keep=1)[:, 0]
        self.check_finite()

    def take_token(self, logits_BV: Tensor, step: int) -> Tensor:
        """Sample token number `step` of every row, store it and note which rows end with it. Returns ids [B]."""
        token_B, logprob_B, usable_B = sample(logits_BV, self.params, step)
        self.ids_NT[self.row_B, step] = token_B
        self.logprobs_NT[self.row_B, step] = logprob_B
        stop_B = (token_B[:, None] == self.stop_ids_BS).any(dim=1)
        if self.stop_strings.any:
            stop_B |= self.stop_strings.found(self.ids_NT, self.row_B, step, ~self.done_B)
        stop_B &= ~self.done_B
        self.bad_B |= ~usable_B & ~self.done_B
        self.stopped_N[self.row_B] |= stop_B
        self.length_N[self.row_B] = torch.where(stop_B, step + 1, self.length_N[self.row_B])
        self.done_B |= stop_B | (self.max_new_B == step + 1)
        return token_B

    def check_finite(self) -> None:
        """Raise EngineError when the logits behind a sampled token were not finite."""
        if self.bad_B.any():
            row = int(self.row_B[self.bad_B][0])
            raise EngineError(
                f"logits for request {self.jobs[row].request.id!r} are not finite: the policy's weights are NaN or "
                "overflow; look at the last updates (learning rate, gradient norm, dtype) and load a good checkpoint"
            )

    def drop_finished(self) -> Tensor | None:
        """Take finished rows out of this wave's tensors if they are many: the places of those kept, [B']; else None."""
        finished = int(self.done_B.sum())
        if not finished or finished < COMPACT_SHARE * len(self.done_B):
            return None
        kept_B = (~self.done_B).nonzero()[:, 0]
        self.row_B = self.row_B[kept_B]
        self.params = self.params.select(kept_B)
        self.stop_ids_BS, self.max_new_B = self.stop_ids_BS[kept_B], self.max_new_B[kept_B]
        self.done_B, self.bad_B = self.done_B[kept_B], self.bad_B[kept_B]
        return kept_B

    def completions(self, version: int) -> list[Completion]:
        """What was sampled, in the order of the jobs."""
        ids, logprobs = self.ids_NT.tolist(), self.logprobs_NT.tolist()
        lengths, stopped = self.length_N.tolist(), self.stopped_N.tolist()

        def completion(n: int, job: _Job) -> Completion:
            reason: FinishReason = "stop" if stopped[n] else "length"
            end = lengths[n]
            return Completion(job.request.id, ids[n][:end], logprobs[n][:end], reason, version)

        return [completion(n, job) for n, job in enumerate(self.jobs)]


def prefill(lm: CausalLM, jobs: list[_Job], limits: Limits) -> tuple[Tensor, Cache, Tensor | None, Tensor]:
    """Run each distinct prompt once and give every job its row.

    jobs: equal prompts adjacent, shorter prompts first. Returns logits of the next token [N, V]; the cache, in which
    all prompts end at one column; the mask over the columns of prompt and completion [N, L], True where a token is,
    `None` when no prompt is padded; the prompts' lengths [N].
    """
    groups: dict[tuple[int, ...], int] = Counter(job.request.prompt_ids for job in jobs)
    prompts = list(groups)
    longest = len(prompts[-1])
    columns = longest + max(j.max_new for j in jobs)
    logits: list[Tensor] = []
    caches: list[tuple[Cache, Tensor]] = []
    for batch in _prefill_batches(prompts, limits.prefill_tokens) if lm.plain_attention else [prompts]:
        logits_PV, cache = _prefill_batch(lm, batch)
        repeats_P = torch.tensor([groups[prompt] for prompt in batch], device=lm.device)
        index_B = torch.arange(len(batch), device=lm.device).repeat_interleave(repeats_P)
        logits.append(logits_PV[index_B])
        caches.append((cache, index_B))
    if lm.plain_attention:
        parts = cast(list[tuple[GrowingCache, Tensor]], caches)
        cache = GrowingCache.merge(lm.config, parts, capacity=min(columns, longest + FIRST_ROOM))
    else:
        select_rows(cache, index_B)

    prompt_len_N = torch.tensor([len(j.request.prompt_ids) for j in jobs], device=lm.device)
    padded = len(prompts[0]) < longest
    mask_NL = torch.arange(columns, device=lm.device) >= (longest - prompt_len_N)[:, None] if padded else None
    return torch.cat(logits), cache, mask_NL, prompt_len_N


def _prefill_batches(prompts: list[tuple[int, ...]], max_tokens: int) -> Iterator[list[tuple[int, ...]]]:
    """Prompts in order of length, cut where prompts x longest would exceed `max_tokens`."""
    batch: list[tuple[int, ...]] = []
    for prompt in prompts:
        if batch and (len(batch) + 1) * len(prompt) > max_tokens:
            yield batch
            batch = []
        batch.append(prompt)
    yield batch


def _prefill_batch(lm: CausalLM, prompts: list[tuple[int, ...]]) -> tuple[Tensor, Cache]:
    """Logits after each prompt, [P, V], and the left-padded cache."""
    longest = max(map(len, prompts))
    ids_PT = torch.tensor([(0,) * (longest - len(p)) + p for p in prompts], device=lm.device)
    padding_P1 = torch.tensor([[longest - len(p)] for p in prompts], device=lm.device)
    columns_T = torch.arange(longest, device=lm.device)
    positions_PT = (columns_T - padding_P1).clamp(min=0)
    mask_PT = columns_T >= padding_P1 if len(prompts[0]) < longest else None
    cache = lm.new_cache()
    return lm.forward(ids_PT, positions_PT, mask_PT, cache, keep=1)[:, 0], cache


def _stop_table(stop_ids: list[frozenset[int]], device: torch.device) -> Tensor:
    """[N, S] ids, padded with -1, which no token has."""
    width = max(1, *map(len, stop_ids)) if stop_ids else 1
    return torch.tensor([[*sorted(ids), *[-1] * (width - len(ids))] for ids in stop_ids], device=device)
