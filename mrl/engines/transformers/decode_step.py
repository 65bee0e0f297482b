"""One decode step: the interface, and the eager implementation.

`eager` calls the model on a cache of exactly the columns in use. `static` (mrl.engines.transformers.static_step) calls
it on a cache of fixed size, so that a step is always the same sequence of kernels and can be recorded and replayed.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from mrl.engines.transformers.image_prompts import PositionShift
from mrl.engines.transformers.kv_cache import GrowingCache, RowStates, select_rows
from mrl.engines.transformers.model import CausalLM
from mrl.engines.transformers.prefill import Prefilled
from mrl.system.transfers import to_device


class DecodeStep(Protocol):
    """The KV cache of B rows, and the model's next step on it. Finished rows stay until replaced or dropped."""

    def clear(self) -> None:
        """Remove every row: the next `put` starts a batch."""

    def put(self, part: Prefilled, index_N: Tensor, slots_N: Tensor, rows: int, *, room: int, max_length: int) -> None:
        """Row `slots_N[n]` becomes the part's prompt `index_N[n]`.

        rows: number of rows afterwards. room: a guess of the tokens that will follow. max_length: most tokens any row
        may reach.
        """

    def measure(self, shortest: int, longest: int) -> None:
        """Called after rows came or went: the tokens of running rows, without the one just sampled."""

    def forward(self, token_B: Tensor, length_B: Tensor) -> Tensor:
        """Logits [B, V] after one more token per row. length_B: each row's tokens including it; finished rows: any."""

    def row(self, slot: int, columns: int, length: int) -> RowStates | None:
        """A copy of the states of the first `length` tokens of a row that has `columns` in the cache; None where the
        cache cannot be taken apart."""

    def keep(self, kept: list[int]) -> None:
        """Keep these rows, in that order."""


class EagerStep:
    """A `DecodeStep` on the model's own cache or on `GrowingCache`; all rows end at the same column."""

    def __init__(self, lm: CausalLM, max_model_len: int) -> None:
        self.lm, self.max_model_len = lm, max_model_len
        self.cache: Cache
        self.columns = 0
        """Cache columns in use; the rows end at the last one."""
        self.padded = False
        """Whether some row starts after the first column."""
        self.shift = PositionShift(lm)

    def clear(self) -> None:
        self.cache = self.lm.new_cache()
        self.shift.clear()

    def put(self, part: Prefilled, index_N: Tensor, slots_N: Tensor, rows: int, *, room: int, max_length: int) -> None:
        length = max(map(len, part.prompts))
        self.shift.put(part.prompts, index_N, slots_N, rows)
        if isinstance(part.cache, GrowingCache):
            assert isinstance(self.cache, GrowingCache)
            each_once = len(slots_N) == len(part.prompts)
            self.cache.put(slots_N, rows, part.cache, None if each_once else index_N, length, room)
        else:
            self.cache, self.columns = part.cache, length
            select_rows(self.cache, index_N)

    def measure(self, shortest: int, longest: int) -> None:
        if isinstance(self.cache, GrowingCache):
            self.columns = longest
            self.cache.keep_columns(self.columns)
        self.padded = (shortest, longest) != (self.columns, self.columns)

    def forward(self, token_B: Tensor, length_B: Tensor) -> Tensor:
        self.columns += 1
        seen_BL: Tensor | None = None
        if self.padded:
            columns_L = torch.arange(self.columns, device=token_B.device)
            seen_BL = columns_L >= (self.columns - length_B)[:, None]
        # Finished rows keep running until replaced or dropped; their positions must stay valid for the model.
        position_B1 = (length_B - 1).clamp(max=self.max_model_len - 1)[:, None]
        given = self.shift.inputs(position_B1)
        return self.lm.forward(token_B[:, None], position_B1, seen_BL, self.cache, keep=1, given=given)[:, 0]

    def row(self, slot: int, columns: int, length: int) -> RowStates | None:
        return self.cache.row(slot, columns, length) if isinstance(self.cache, GrowingCache) else None

    def keep(self, kept: list[int]) -> None:
        device = self.lm.device
        self.shift.keep(kept)
        if not isinstance(self.cache, GrowingCache):
            select_rows(self.cache, to_device(device, kept))
            return
        moved = [(place, slot) for place, slot in enumerate(kept) if place != slot]
        places, slots = ([pair[part] for pair in moved] for part in (0, 1))
        self.cache.keep(len(kept), to_device(device, places, torch.int64), to_device(device, slots, torch.int64))
