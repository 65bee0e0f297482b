"""Prefill: each distinct prompt once, a prefix that all of them share once for all, and nothing that is known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from mrl.engines.transformers.kv_cache import GrowingCache, RowStates
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
    computed_P: list[int]
    """Tokens that went through the model for each prompt; a shared prefix's count for the first."""

    def only(self, row: int) -> Prefilled:
        """A copy with one prompt only, so that the others' memory can be freed. Its tokens are counted here."""
        assert isinstance(self.cache, GrowingCache)
        cache = self.cache.empty()
        index = to_device(self.logits_PV.device, [row])
        cache.put(torch.zeros_like(index), 1, self.cache, index, len(self.prompts[row]), room=0)
        return Prefilled([self.prompts[row]], cache, self.logits_PV[row : row + 1].clone(), [0])


class Prefiller:
    """Prefills prompts out of `prompts`, at most `max_tokens` (prompts x longest) per forward.

    A prefix shared by all `prompts`, such as a system prompt, is computed at the first call that needs it and kept.
    """

    def __init__(self, lm: CausalLM, prompts: Sequence[TokenIds], max_tokens: int) -> None:
        self.lm, self.max_tokens = lm, max_tokens
        self.prefix: TokenIds = ()
        self.prefix_states: RowStates | None = None
        if lm.replaces_rows and len(prompts) > 1:
            # The common prefix of the smallest and the largest is that of all; each prompt keeps at least one token.
            pairs = zip(min(prompts), max(prompts), strict=False)
            alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            shared = min(alike, min(map(len, prompts)) - 1)
            if shared * (len(prompts) - 1) >= MIN_SAVED_TOKENS:
                self.prefix = prompts[0][:shared]

    def run(self, prompts: list[TokenIds], known: Mapping[TokenIds, RowStates]) -> Iterator[Prefilled]:
        """prompts: distinct, longest first. known: the states of a beginning, for prompts that have them. Models with
        their own cache get all in one forward."""
        if not self.lm.replaces_rows:
            yield self._whole(prompts)
            return
        for batch in self._batches([prompt for prompt in prompts if prompt not in known]):
            first = self.prefix_states is None
            prefix = self._prefix()
            part = self._whole(batch) if prefix is None else self._after([prefix] * len(batch), batch)
            if prefix is not None and first:
                part.computed_P[0] += len(prefix)
            yield part
        for batch in self._batches_of_rests([prompt for prompt in prompts if prompt in known], known):
            yield self._after([known[prompt] for prompt in batch], batch)

    def _batches(self, prompts: list[TokenIds]) -> Iterator[list[TokenIds]]:
        batch: list[TokenIds] = []
        for prompt in prompts:
            if batch and (len(batch) + 1) * len(batch[0]) > self.max_tokens:
                yield batch
                batch = []
            batch.append(prompt)
        if batch:
            yield batch

    def _batches_of_rests(
        self, prompts: list[TokenIds], known: Mapping[TokenIds, RowStates]
    ) -> Iterator[list[TokenIds]]:
        """Those together whose rests are about equally long, for shorter ones are padded."""

        def rest(prompt: TokenIds) -> int:
            return len(prompt) - len(known[prompt])

        batch: list[TokenIds] = []
        longest = 0
        for prompt in sorted(prompts, key=rest, reverse=True):
            longest = max(longest, len(prompt))
            if batch and (
                (len(batch) + 1) * longest > self.max_tokens or rest(batch[0]) - rest(prompt) >= MIN_SAVED_TOKENS
            ):
                yield batch
                batch, longest = [], len(prompt)
            batch.append(prompt)
        if batch:
            yield batch

    def _prefix(self) -> RowStates | None:
        """The states of the shared prefix, if there is one."""
        if self.prefix and self.prefix_states is None:
            cache = cast(GrowingCache, self._whole([self.prefix]).cache)
            self.prefix_states = cache.row(0, len(self.prefix), len(self.prefix))
        return self.prefix_states

    def _whole(self, prompts: list[TokenIds]) -> Prefilled:
        cache = self.lm.new_cache()
        return Prefilled(prompts, cache, _forward(self.lm, prompts, prompts, cache), [*map(len, prompts)])

    def _after(self, beginnings: list[RowStates], prompts: list[TokenIds]) -> Prefilled:
        """Prefill what follows the beginning of each prompt. In the place of padding, shorter rests get tokens of their
        beginning once more: so each row is in one piece."""
        needed_P = [len(prompt) - len(states) for states, prompt in zip(beginnings, prompts, strict=True)]
        longest = max(needed_P)
        rests = [prompt[-longest:] for prompt in prompts]
        known = [
            states.first(len(prompt) - len(rest))
            for states, prompt, rest in zip(beginnings, prompts, rests, strict=True)
        ]
        cache = cast(GrowingCache, self.lm.new_cache())
        cache.fill(known, room=longest)
        return Prefilled(prompts, cache, _forward(self.lm, rests, prompts, cache), needed_P)


def _forward(lm: CausalLM, tokens: list[TokenIds], prompts: list[TokenIds], cache: Cache) -> Tensor:
    """Logits after each of the left-padded token sequences, [P, V].

    prompts: what each is the last part of; `cache` holds what comes before it, right-aligned too.
    """
    before_P = [len(prompt) - len(rest) for prompt, rest in zip(prompts, tokens, strict=True)]
    longest, behind = max(map(len, tokens)), max(before_P)
    ids_PT = to_device(lm.device, [(0,) * (longest - len(t)) + t for t in tokens])
    before_P1 = to_device(lm.device, [[before] for before in before_P])
    padding_P1 = to_device(lm.device, [[longest - len(t)] for t in tokens])
    columns_T = torch.arange(longest, device=lm.device)
    positions_PT = before_P1 + (columns_T - padding_P1).clamp(min=0)
    real_PL: Tensor | None = None
    if any(len(t) < longest for t in tokens) or min(before_P) < behind:
        seen_PB = torch.arange(behind, device=lm.device) >= behind - before_P1
        real_PL = torch.cat([seen_PB, columns_T >= padding_P1], dim=1)
    given = {} if lm.images is None else lm.images.inputs(lm, prompts, [len(p) - longest for p in prompts], longest)
    return lm.forward(ids_PT, positions_PT, real_PL, cache, keep=1, given=given)[:, 0]
