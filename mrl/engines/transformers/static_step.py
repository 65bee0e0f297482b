"""A decode step that is always the same sequence of kernels, recorded once per size and replayed.

Rows and columns are rounded up to few sizes. The first steps of a size run directly, which warms up what libraries
initialise lazily; then one is recorded, and later ones are replays. On CUDA the recorder makes CUDA graphs
(mrl.engines.transformers.cuda_graphs). Without a recorder the step is always called directly.

Sampling is not recorded: its filters depend on the requests. A layer with a sliding window reads all columns in use and
masks those outside its window.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mrl.engines.transformers.kv_cache import GrowingCache, RowStates
from mrl.engines.transformers.model import CausalLM
from mrl.engines.transformers.prefill import Prefilled
from mrl.engines.transformers.static_cache import StaticCache
from mrl.system.transfers import to_device

WARM_UP_STEPS = 3
"""Steps of a size before it is recorded: a recording has a cost, which a size that is soon left does not earn."""

MIN_COLUMNS = 64
"""Fewest columns that a step attends to; a multiple of 8, as attention kernels want their masks."""


class StaticStep:
    """A `DecodeStep` on a `StaticCache`.

    Recordings hold addresses of weights, and under autocast of their casts. For a module that others use too these may
    change, so the step lives for one batch. An engine with a module of its own keeps the step, and loads new weights
    into the same memory.
    """

    def __init__(self, lm: CausalLM, max_model_len: int, max_batch_tokens: int = 0) -> None:
        assert lm.windows is not None
        self.lm, self.max_model_len, self.max_batch_tokens = lm, max_model_len, max_batch_tokens
        self.cache = StaticCache(len(lm.windows), lm.device)
        self.recorder = lm.new_recorder()
        self.ids_R = torch.zeros(0, dtype=torch.int64, device=lm.device)
        self.logits_RV = torch.zeros(0, lm.vocab_size, device=lm.device)
        """One output buffer for all recordings; otherwise each would keep its own."""
        self.begins = True
        """Whether the next `put` starts a batch."""
        self.columns = 0
        """Tokens of the longest running row."""
        self.warm: dict[tuple[int, int], int] = {}
        """Steps run so far at sizes that are not recorded yet."""
        self.recorded: dict[tuple[int, int], Callable[[], Tensor]] = {}

    def clear(self) -> None:
        """Keeps the buffers, since recordings point to them, but zeroes them: NaN from a batch under broken weights
        would pass through every mask."""
        self.begins = True
        self.cache.blank()

    def put(self, part: Prefilled, index_N: Tensor, slots_N: Tensor, rows: int, *, room: int, max_length: int) -> None:
        assert isinstance(part.cache, GrowingCache)
        if not self.cache.fits(rows, max_length):
            if self.begins:  # sized for this batch alone, not also for the most rows and columns of earlier ones
                self.cache = StaticCache(len(self.cache.static_layers), self.lm.device)
            self.recorded, self.warm = {}, {}  # they write into the old buffers
            self.cache.resize(*self._buffer_size(rows, max_length), like=part.cache)
            self.logits_RV = part.logits_PV.new_zeros(self.cache.rows, part.logits_PV.shape[1])
            self.ids_R = torch.zeros(self.cache.rows, dtype=torch.int64, device=self.lm.device)
        self.begins = False
        lengths_P = to_device(self.lm.device, [len(prompt) for prompt in part.prompts])
        self.cache.put(slots_N, part.cache, index_N, lengths_P[index_N], max(map(len, part.prompts)))

    def measure(self, shortest: int, longest: int) -> None:
        self.columns = longest

    def forward(self, token_B: Tensor, length_B: Tensor) -> Tensor:
        """See `DecodeStep.forward`. The result is overwritten by the next step."""
        self.columns += 1
        batch = len(token_B)
        rows = min(size_for(batch), self.cache.rows)
        room = min(max(size_for(self.columns), MIN_COLUMNS), self.cache.capacity)
        self.ids_R[:batch] = token_B
        # Finished rows keep running; they may overwrite their own last column.
        self.cache.positions_R[:batch] = (length_B - 1).clamp(max=min(self.max_model_len, room) - 1)
        self.cache.positions_R[batch:rows] = 0
        self.cache.room = room
        return self._run(rows, room)[:batch]

    def row(self, slot: int, columns: int, length: int) -> RowStates:
        return self.cache.row(slot, length)

    def keep(self, kept: list[int]) -> None:
        self.cache.keep(to_device(self.lm.device, kept))

    def _buffer_size(self, rows: int, max_length: int) -> tuple[int, int]:
        """Rows and columns for what is wanted. When a batch grows, with some to spare if `max_batch_tokens` allows it:
        requests that join come one by one, conversations get longer, and each size makes all recordings anew."""
        exact = rows, -(-max_length // 8) * 8
        spare = (
            max(size_for(rows), self.cache.rows),
            max(min(size_for(exact[1]), -(-self.max_model_len // 8) * 8), self.cache.capacity, MIN_COLUMNS),
        )
        return exact if self.begins or spare[0] * spare[1] > self.max_batch_tokens else spare

    def _run(self, rows: int, room: int) -> Tensor:
        size = (rows, room)
        if size in self.recorded:
            return self.recorded[size]()

        def run() -> Tensor:
            logits_RV = self.lm.step(self.ids_R[:rows], self.cache.positions_R[:rows], room, self.cache)
            return self.logits_RV[:rows].copy_(logits_RV)

        if self.recorder is None:
            return run()
        self.warm[size] = self.warm.get(size, 0) + 1
        if self.warm[size] <= WARM_UP_STEPS:
            return self.recorder.warm_up(run)
        try:
            self.recorded[size] = self.recorder.record(run)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.lm.refuse_recording(error)
            self.recorder = None
            return run()
        return self.recorded[size]()


def size_for(count: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, 24 …: at most half too much, and few enough to record each."""
    power = 1 << max(0, count - 1).bit_length()
    return power * 3 // 4 if power >= 4 and count <= power * 3 // 4 else power
