"""KV caches whose rows can be replaced, dropped and repeated.

Models with full or sliding-window attention get `GrowingCache`. It writes keys and values in place into buffers that
grow by half, where transformers' `DynamicCache` copies everything at every token, and a finished row can be overwritten
by another prompt. Other layer kinds (linear attention, chunks, ...) keep transformers' own layers, of which only the
row selection is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
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


@dataclass(frozen=True, slots=True)
class RowStates:
    """Keys and values of the first T tokens of one row, in all layers, outside of any cache."""

    packed_TF: Tensor
    """Side by side: keys of the first layer, its values, keys of the second layer …"""
    shapes: tuple[tuple[int, int], ...]
    """Of each of them: heads and their width."""

    @classmethod
    def copied(cls, parts: Sequence[Tensor]) -> RowStates | None:
        """parts: [heads, T, width] each. None for a mix of dtypes, which are not stored together."""
        if len({part.dtype for part in parts}) > 1:
            return None
        shapes = tuple((part.shape[0], part.shape[2]) for part in parts)
        packed_TF = parts[0].new_empty(parts[0].shape[1], sum(heads * width for heads, width in shapes))
        for to_THD, part in zip(_unpacked(packed_TF, shapes), parts, strict=True):
            to_THD.copy_(part.transpose(0, 1))
        return cls(packed_TF, shapes)

    def __len__(self) -> int:
        return len(self.packed_TF)

    @property
    def nbytes(self) -> int:
        """Memory it takes."""
        return self.packed_TF.nbytes

    def first(self, length: int) -> RowStates:
        """Of its first tokens only; shares the memory."""
        return RowStates(self.packed_TF[:length], self.shapes)


def _unpacked(packed: Tensor, shapes: Sequence[tuple[int, int]]) -> Iterator[Tensor]:
    """The parts of the last dimension, each as [..., heads, width]. Views."""
    for part, shape in zip(packed.split([heads * width for heads, width in shapes], dim=-1), shapes, strict=True):
        yield part.unflatten(-1, shape)


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
        self._buffers: list[Tensor] = []

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append the states of new tokens; returns all keys and values so far, or with one new token per row those in
        the layer's window."""
        key_states, value_states = as_multiplied(key_states, value_states)
        first, new = self.start, key_states.shape[2]
        if not self._buffers:
            self._buffers = [key_states, value_states]
            self.end, self.is_initialized = new, True
            return key_states, value_states
        self._make_room(new)
        first, self.end = self.start, self.end + new
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, self.end - new : self.end] = states
        if new == 1 and self.window is not None:
            first = max(first, self.end - self.window)
        keys, values = self._buffers
        return keys[:, :, first : self.end], values[:, :, first : self.end]

    def states(self) -> list[Tensor]:
        """Keys and values of the columns in use."""
        return [buffer[:, :, self.start : self.end] for buffer in self._buffers]

    def get_seq_length(self) -> int:
        return self.end - self.start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._buffers = [buffer.index_select(0, beam_idx) for buffer in self._buffers]

    def put(self, slots_N: Tensor, rows: int, source: GrowingLayer, index_N: Tensor, length: int, room: int) -> None:
        """Overwrite the rows at `slots_N` by rows `index_N` of `source`, of at most `length` columns, right-aligned.

        rows: number of rows afterwards. room: free columns to add if the buffers are reallocated.
        """
        columns = max(self.get_seq_length(), length)
        if not self._buffers or rows > self._buffers[0].shape[0] or self.end < length:
            shapes = [(rows, b.shape[1], columns + room, b.shape[3]) for b in source._buffers]
            self._move([b.new_zeros(shape) for b, shape in zip(source._buffers, shapes, strict=True)], columns)
            self.is_initialized = True
        self.start = self.end - columns
        for buffer, given in zip(self._buffers, source._buffers, strict=True):
            taken = given[:, :, source.end - length : source.end].index_select(0, index_N)
            buffer[slots_N, :, self.end - length : self.end] = taken

    def row(self, slot: int, columns: int, length: int) -> list[Tensor]:
        """Keys and values, [heads, length, head_dim], of the first tokens of a row that has `columns` tokens."""
        first = self.end - columns
        return [buffer[slot, :, first : first + length] for buffer in self._buffers]

    def fill(self, states: Sequence[Tensor], room: int) -> None:
        """Become these keys and values, [B, L, heads, head_dim]. room: free columns to add."""
        self._buffers = []
        for part in states:
            rows, length, heads, width = part.shape
            self._buffers.append(part.new_zeros(rows, heads, length + room, width))
            self._buffers[-1][:, :, :length] = part.transpose(1, 2)
            self.start, self.end, self.is_initialized = 0, length, True

    def take(self, columns_BT: Tensor) -> None:
        """Reorder columns: column t of row b becomes its former column `columns_BT[b, t]`."""
        rows_B1 = torch.arange(len(columns_BT), device=columns_BT.device)[:, None]
        self._buffers = [s.transpose(1, 2)[rows_B1, columns_BT].transpose(1, 2) for s in self.states()]
        self.start, self.end = 0, columns_BT.shape[1]

    def _make_room(self, new: int) -> None:
        rows, heads, capacity, width = self._buffers[0].shape
        if self.end + new <= capacity:
            return
        length = self.get_seq_length()
        # Free columns at the start are reused before the buffers grow.
        room = max(length + new, length * 3 // 2)
        shapes = [(rows, heads, room, width), (rows, heads, room, self._buffers[1].shape[3])]
        self._move([b.new_zeros(shape) for b, shape in zip(self._buffers, shapes, strict=True)], length)

    def _move(self, buffers: list[Tensor], end: int) -> None:
        """Move to other buffers, with the last column just before `end`."""
        length = self.get_seq_length()
        for new, old in zip(buffers, self._buffers, strict=False):  # there are none yet in a new layer
            new[: old.shape[0], :, end - length : end] = old[:, :, self.start : self.end]
        self._buffers, self.start, self.end = buffers, end - length, end


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

    def put(self, slots_N: Tensor, rows: int, source: GrowingCache, index_N: Tensor, length: int, room: int) -> None:
        """See `GrowingLayer.put`."""
        for mine, theirs in zip(self.growing_layers, source.growing_layers, strict=True):
            mine.put(slots_N, rows, theirs, index_N, length, room)

    def row(self, slot: int, columns: int, length: int) -> RowStates | None:
        """A copy of the states of the first `length` tokens of a row that has `columns` tokens."""
        return RowStates.copied([part for layer in self.growing_layers for part in layer.row(slot, columns, length)])

    def fill(self, rows: Sequence[RowStates], room: int) -> None:
        """Become these rows, right-aligned. room: free columns to add."""
        padded_BLF = pad_sequence([row.packed_TF for row in rows], batch_first=True, padding_side="left")
        parts = list(_unpacked(padded_BLF, rows[0].shapes))
        for number, layer in enumerate(self.growing_layers):
            layer.fill(parts[2 * number : 2 * number + 2], room)

    def take(self, columns_BT: Tensor) -> None:
        """See `GrowingLayer.take`."""
        for layer in self.growing_layers:
            layer.take(columns_BT)

    def keep_columns(self, length: int) -> None:
        """Keep only the last `length` columns; no row needs the others."""
        for layer in self.growing_layers:
            layer.start = max(layer.start, layer.end - length)
