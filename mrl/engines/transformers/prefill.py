"""Prefill: each distinct prompt once, and a prefix that all of them share once for all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from mrl.engines.transformers.kv_cache import GrowingCache
from mrl.engines.transformers.model import CausalLM
from mrl.system.transfers import to_device

TokenIds = tuple[int, ...]

MIN_SAVED_TOKENS = 64
"""A shared prefix is computed separately when that saves this many tokens: it costs an extra forward."""


@dataclass(slots=True)
class Prefilled:
    """P prefilled prompts."""

    prompts: list[TokenIds]
    cache: Cache
    """One row per prompt, all ending at the last column."""
    logits_PV: Tensor
    """After each prompt."""

    def only(self, row: int) -> Prefilled:
        """A copy with one prompt only, so that the others' memory can be freed."""
        assert isinstance(self.cache, GrowingCache)
        cache = self.cache.empty()
        index = to_device(self.logits_PV.device, [row])
        cache.put(torch.zeros_like(index), 1, self.cache, index, len(self.prompts[row]), room=0)
        return Prefilled([self.prompts[row]], cache, self.logits_PV[row : row + 1].clone())


class Prefiller:
    """Prefills prompts out of `prompts`, at most `max_tokens` (prompts x longest) per forward.

    A prefix shared by all `prompts`, such as a system prompt, is computed at the first call and kept.
    """

    def __init__(self, lm: CausalLM, prompts: Sequence[TokenIds], max_tokens: int) -> None:
        self.lm, self.max_tokens = lm, max_tokens
        self.prefix: TokenIds = ()
        self.prefix_cache: GrowingCache | None = None
        if lm.replaces_rows and len(prompts) > 1:
            # The common prefix of the smallest and the largest is that of all; each prompt keeps at least one token.
            pairs = zip(min(prompts), max(prompts), strict=False)
            alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            shared = min(alike, min(map(len, prompts)) - 1)
            if shared * (len(prompts) - 1) >= MIN_SAVED_TOKENS:
                self.prefix = prompts[0][:shared]

    def run(self, prompts: list[TokenIds]) -> Iterator[Prefilled]:
        """prompts: distinct, longest first. Models with their own cache get them in one forward."""
        for batch in self._batches(prompts) if self.lm.replaces_rows else [prompts]:
            if self.prefix:
                yield self._continue(batch)
            else:
                cache = self.lm.new_cache()
                yield Prefilled(batch, cache, _forward(self.lm, batch, cache))

    def _batches(self, prompts: list[TokenIds]) -> Iterator[list[TokenIds]]:
        batch: list[TokenIds] = []
        for prompt in prompts:
            if batch and (len(batch) + 1) * len(batch[0]) > self.max_tokens:
                yield batch
                batch = []
            batch.append(prompt)
        yield batch

    def _continue(self, prompts: list[TokenIds]) -> Prefilled:
        """Prefill the rest of each prompt after the shared prefix."""
        if self.prefix_cache is None:
            self.prefix_cache = cast(GrowingCache, self.lm.new_cache())
            _forward(self.lm, [self.prefix], self.prefix_cache)
        shared, rows = len(self.prefix), torch.arange(len(prompts), device=self.lm.device)
        rests = [prompt[shared:] for prompt in prompts]
        longest = max(map(len, rests))
        cache = cast(GrowingCache, self.lm.new_cache())
        cache.put(rows, len(prompts), self.prefix_cache, torch.zeros_like(rows), shared, room=longest)
        logits_PV = _forward(self.lm, rests, cache)
        if min(map(len, rests)) < longest:  # close the gap between the prefix and a shorter rest
            columns_T = torch.arange(shared + longest, device=self.lm.device)
            gap_P1 = to_device(self.lm.device, [[longest - len(rest)] for rest in rests])
            moved_PT = (columns_T - gap_P1).clamp(min=0)
            cache.take(torch.where(moved_PT < shared, moved_PT, columns_T))
        return Prefilled(prompts, cache, logits_PV)


def _forward(lm: CausalLM, prompts: list[TokenIds], cache: Cache) -> Tensor:
    """Logits after each of the left-padded token sequences, [P, V]; `cache` holds the tokens before them."""
    longest, before = max(map(len, prompts)), cache.get_seq_length()
    ids_PT = to_device(lm.device, [(0,) * (longest - len(p)) + p for p in prompts])
    padding_P1 = to_device(lm.device, [[longest - len(p)] for p in prompts])
    columns_T = torch.arange(longest, device=lm.device)
    positions_PT = before + (columns_T - padding_P1).clamp(min=0)
    real_PL: Tensor | None = None
    if any(len(p) < longest for p in prompts):
        behind_PB = torch.ones(len(prompts), before, dtype=torch.bool, device=lm.device)
        real_PL = torch.cat([behind_PB, columns_T >= padding_P1], dim=1)
    return lm.forward(ids_PT, positions_PT, real_PL, cache, keep=1)[:, 0]
