"""KV caches whose rows can be replaced, dropped and repeated.

Models with full or sliding-window attention get `GrowingCache`. It writes keys and values in place into buffers that
grow by half, where transformers' `DynamicCache` copies everything at every token, and a finished row can be overwritten
by another prompt. Other layer kinds (linear attention, chunks, ...) keep transformers' own layers, of which only the
row selection is used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from mrl.errors import EngineError

_SELECTABLE_LAYERS = {
    DynamicLayer,
    DynamicSlidingWindowLayer,
    DynamicIndexedLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
}
"""Exact classes whose `reorder_cache` is known to move all of a layer's per-row state."""


def layer_windows(config: PreTrainedConfig) -> list[int | None] | None:
    """The attention window of each layer, None = full attention. Returns None instead of a list when `GrowingCache`
    does not support some layer. Raises EngineError if no cache does."""
    try:
        layers = DynamicCache(config=config).layers
    except (KeyError, AttributeError, TypeError) as e:
        raise EngineError(
            f"transformers builds no cache for model type {config.model_type!r} ({e}); use engine 'vllm' for this model"
        ) from e
    unknown = {type(layer).__name__ for layer in layers if type(layer) not in _SELECTABLE_LAYERS}
    if unknown:
        raise EngineError(
            f"the cache of model type {config.model_type!r} has layers whose rows cannot be selected "
            f"({', '.join(sorted(unknown))}); use engine 'vllm' for this model"
        )
    kinds = set(getattr(config.get_text_config(decoder=True), "layer_types", None) or ())
    if not kinds <= {"full_attention", "sliding_attention"}:  # chunked attention has the sliding kind's cache
        return None
    windows: list[int | None] = []
    for layer in layers:
        if type(layer) is DynamicSlidingWindowLayer:
            windows.append(layer.sliding_window)
        elif type(layer) is DynamicLayer:
            windows.append(None)
        else:
            return None
    return windows


SHIFTED_ROWS = 16
"""Rows that are moved at a time inside buffers: so many are held twice."""

Shape = tuple[int, int]
"""Heads of keys or values, and their width."""


@dataclass(frozen=True, slots=True)
class RowStates:
    """Keys and values of the first T tokens of one row, in all layers, outside of any cache."""

    stacks: dict[Shape, Tensor]
    """Those of one shape together, in the order of the layers, [N, heads, T, width]."""
    shapes: tuple[Shape, ...]
    """Of the keys and the values of each layer."""

    @classmethod
    def copied(cls, parts: Sequence[Tensor]) -> RowStates:
        """parts: keys and values of each layer, [heads, T, width]."""
        shapes = tuple((part.shape[0], part.shape[2]) for part in parts)
        stacks = {
            shape: torch.stack([part for part, its in zip(parts, shapes, strict=True) if its == shape])
            for shape in dict.fromkeys(shapes)
        }
        return cls(stacks, shapes)

    def __len__(self) -> int:
        """Tokens."""
        return next(iter(self.stacks.values())).shape[2]

    @property
    def nbytes(self) -> int:
        """Memory it takes."""
        return sum(stack.nbytes for stack in self.stacks.values())

    def first(self, length: int) -> RowStates:
        """Of its first tokens only; shares the memory."""
        return RowStates({shape: stack[:, :, :length] for shape, stack in self.stacks.items()}, self.shapes)


def side_by_side(rows: Sequence[RowStates], room: int) -> list[Tensor]:
    """Keys and values of each layer, [B, heads, L + room, width], of which the first L columns hold the rows,
    right-aligned. The others are 0."""
    longest = max(map(len, rows))
    parts = {}
    for (heads, width), stack in rows[0].stacks.items():
        together = stack.new_zeros(len(stack), len(rows), heads, longest + room, width)
        for number, row in enumerate(rows):
            together[:, number, :, longest - len(row) : longest] = row.stacks[heads, width]
        parts[heads, width] = iter(together)
    return [next(parts[shape]) for shape in rows[0].shapes]


def as_multiplied(*states: Tensor) -> tuple[Tensor, ...]:
    """Keys and values in the dtype that attention uses: autocast rounds them at each use, while rotated keys arrive in
    float32."""
    kind = states[0].device.type
    if not torch.is_autocast_enabled(kind):
        return states
    return tuple(s.to(torch.get_autocast_dtype(kind)) for s in states)


def select_rows(cache: Cache, index_B: Tensor) -> None:
    """Keep the rows at `index_B` (repeats allowed), in that order."""
    cache.reorder_cache(cast(torch.LongTensor, index_B))


class GrowingLayer(DynamicLayer):
    """One layer's keys and values, [B, heads, L, head_dim], as views of the columns `start` to `end` of two buffers.

    All rows end at the same column: a shorter row has columns before its first token that must be masked. Their values
    are finite.
    """

    def __init__(self, window: int | None = None) -> None:
        super().__init__()
        self.window = window
        self.start = self.end = 0
        self.rows = 0
        """B; the buffers may have more."""
        self._buffers: list[Tensor] = []

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append the states of new tokens; returns all keys and values so far, or with one new token per row those in
        the layer's window."""
        key_states, value_states = as_multiplied(key_states, value_states)
        first, new = self.start, key_states.shape[2]
        if not self._buffers:
            self._buffers = [key_states, value_states]
            self.rows, self.end, self.is_initialized = key_states.shape[0], new, True
            return key_states, value_states
        self._make_room(new)
        first, self.end = self.start, self.end + new
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[: self.rows, :, self.end - new : self.end] = states
        if new == 1 and self.window is not None:
            first = max(first, self.end - self.window)
        keys, values = (buffer[: self.rows] for buffer in self._buffers)
        return keys[:, :, first : self.end], values[:, :, first : self.end]

    def keep(self, rows: int, places_M: Tensor, from_M: Tensor) -> None:
        """Keep the first `rows` rows, after those at `from_M` were copied to `places_M`."""
        for buffer in self._buffers:
            columns = buffer[:, :, self.start : self.end]
            columns[places_M] = columns[from_M]
        self.rows = rows

    def states(self) -> list[Tensor]:
        """Keys and values of the columns in use."""
        return [buffer[: self.rows, :, self.start : self.end] for buffer in self._buffers]

    def get_seq_length(self) -> int:
        return self.end - self.start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._buffers = [buffer.index_select(0, beam_idx) for buffer in self._buffers]
        self.rows = len(beam_idx)

    def put(
        self, slots_N: Tensor, rows: int, source: GrowingLayer, index_N: Tensor | None, length: int, room: int
    ) -> None:
        """Overwrite the rows at `slots_N` by rows `index_N` of `source`, of at most `length` columns, right-aligned.
        index_N: None = all, in their order.

        rows: number of rows afterwards. room: free columns to add if the buffers are reallocated.
        """
        columns = max(self.get_seq_length(), length)
        capacity, width = (self._buffers[0].shape[0], self._buffers[0].shape[2]) if self._buffers else (0, 0)
        if rows > capacity or columns > width:
            before = 0
            if self._buffers:  # by half, as requests that join come one by one, and in conversations ever longer
                room, before = max(room, columns // 2), columns // 8
            capacity = max(rows, capacity * 3 // 2) if rows > capacity else min(capacity, rows * 3 // 2)
            shapes = [(capacity, b.shape[1], before + columns + room, b.shape[3]) for b in source._buffers]
            buffers = [_zeros(b, shape) for b, shape in zip(source._buffers, shapes, strict=True)]
            self._move(buffers, before + columns)
            self.is_initialized = True
        elif self.end < length:
            self._shift(columns + (width - columns) // 4)
        self.rows, self.start = rows, self.end - columns
        for buffer, given in zip(self._buffers, source._buffers, strict=True):
            taken = given[: source.rows, :, source.end - length : source.end]
            if index_N is not None:
                taken = taken.index_select(0, index_N)
            buffer[slots_N, :, self.end - length : self.end] = taken

    def row(self, slot: int, columns: int, length: int) -> list[Tensor]:
        """Keys and values, [heads, length, head_dim], of the first tokens of a row that has `columns` tokens."""
        first = self.end - columns
        return [buffer[slot, :, first : first + length] for buffer in self._buffers]

    def fill(self, keys: Tensor, values: Tensor, length: int) -> None:
        """Take these tensors as buffers, of which the first `length` columns are in use."""
        self._buffers, self.rows, self.start, self.end = [keys, values], keys.shape[0], 0, length
        self.is_initialized = True

    def _make_room(self, new: int) -> None:
        rows, heads, capacity, width = self._buffers[0].shape
        if self.end + new <= capacity:
            return
        length = self.get_seq_length()
        if length * 5 // 4 + new <= capacity:  # free columns at the start are reused before the buffers grow
            self._shift(length)
            return
        room = max(length + new, length * 3 // 2)
        shapes = [(rows, heads, room, width), (rows, heads, room, self._buffers[1].shape[3])]
        self._move([_zeros(b, shape) for b, shape in zip(self._buffers, shapes, strict=True)], length)

    def _shift(self, end: int) -> None:
        """Move inside the buffers, a few rows at a time, so that the last column is just before `end`."""
        length = self.get_seq_length()
        for buffer in self._buffers:
            for rows in buffer[: self.rows].split(SHIFTED_ROWS):
                rows[:, :, end - length : end] = rows[:, :, self.start : self.end].clone()
        self.start, self.end = end - length, end

    def _move(self, buffers: list[Tensor], end: int) -> None:
        """Move to other buffers, with the last column just before `end`."""
        length = self.get_seq_length()
        for new, old in zip(buffers, self._buffers, strict=False):  # there are none yet in a new layer
            new[: self.rows, :, end - length : end] = old[: self.rows, :, self.start : self.end]
        self._buffers, self.start, self.end = buffers, end - length, end


_ALIGNED = 64
"""Bytes: as torch aligns its own tensors. The last bits of a product can depend on it."""


def _zeros(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Zeros of the same kind. On a CPU they take neither memory nor time before they are used, where torch's own are
    written at once: the first use of each page of memory is what costs."""
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    size = math.prod(shape) * like.itemsize
    memory = np.zeros(size + _ALIGNED, dtype=np.uint8)
    first = -memory.ctypes.data % _ALIGNED
    return torch.from_numpy(memory[first : first + size]).view(like.dtype).view(shape)


class GrowingCache(DynamicCache):
    """A `DynamicCache` of `GrowingLayer`s.

    windows: the attention window of each layer, None = full attention.
    """

    def __init__(self, config: PreTrainedConfig, windows: list[int | None]) -> None:
        super().__init__(config=config)
        self._made_from = (config, windows)
        self.layers = [GrowingLayer(window) for window in windows]

    @property
    def growing_layers(self) -> list[GrowingLayer]:
        """The layers by their own type."""
        return cast(list[GrowingLayer], self.layers)

    def empty(self) -> GrowingCache:
        """An empty cache of the same kind."""
        return GrowingCache(*self._made_from)

    def put(
        self, slots_N: Tensor, rows: int, source: GrowingCache, index_N: Tensor | None, length: int, room: int
    ) -> None:
        """See `GrowingLayer.put`."""
        for mine, theirs in zip(self.growing_layers, source.growing_layers, strict=True):
            mine.put(slots_N, rows, theirs, index_N, length, room)

    def keep(self, rows: int, places_M: Tensor, from_M: Tensor) -> None:
        """See `GrowingLayer.keep`."""
        for layer in self.growing_layers:
            layer.keep(rows, places_M, from_M)

    def row(self, slot: int, columns: int, length: int) -> RowStates:
        """A copy of the states of the first `length` tokens of a row that has `columns` tokens."""
        return RowStates.copied([part for layer in self.growing_layers for part in layer.row(slot, columns, length)])

    def fill(self, rows: Sequence[RowStates], room: int) -> None:
        """Become these rows, right-aligned. room: free columns to add."""
        parts = side_by_side(rows, room)
        for layer, keys, values in zip(self.growing_layers, parts[::2], parts[1::2], strict=True):
            layer.fill(keys, values, max(map(len, rows)))

    def keep_columns(self, length: int) -> None:
        """Keep only the last `length` columns; no row needs the others."""
        for layer in self.growing_layers:
            layer.start = max(layer.start, layer.end - length)
