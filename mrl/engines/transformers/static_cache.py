"""A KV cache of fixed size, for steps that are recorded once and replayed.

Each row starts at the first column. The column of its next token is given by a tensor, so that neither shapes nor
Python numbers change from step to step. Values after a row's end are finite and must be masked.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from mrl.engines.transformers.kv_cache import GrowingCache, GrowingLayer, RowStates


class StaticLayer(CacheLayerMixin):
    """One layer's keys and values in buffers [rows, heads, room, head_dim], of which a step uses a leading part."""

    def __init__(self, cache: StaticCache) -> None:
        super().__init__()
        self._cache = cache
        self._buffers: list[Tensor] = []

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the states of one token per row at the cache's `positions_R`; returns all of the part in use."""
        rows, room = key_states.shape[0], self._cache.room
        keys, values = (buffer[:rows, :, :room] for buffer in self._buffers)
        rows_B, positions_B = self._cache.rows_R[:rows], self._cache.positions_R[:rows]
        keys[rows_B, :, positions_B] = key_states[:, :, 0].to(keys.dtype)
        values[rows_B, :, positions_B] = value_states[:, :, 0].to(values.dtype)
        return keys, values

    def put(self, slots_N: Tensor, source: GrowingLayer, index_N1: Tensor, columns_NT: Tensor) -> None:
        """Overwrite the first columns of the rows at `slots_N` with columns `columns_NT` of rows of `source`."""
        for buffer, states in zip(self._buffers, source.states(), strict=True):
            taken_NTHD = states.transpose(1, 2)[index_N1, columns_NT]
            buffer[slots_N, :, : columns_NT.shape[1]] = taken_NTHD.transpose(1, 2).to(buffer.dtype)

    def row(self, slot: int, length: int) -> list[Tensor]:
        """Keys and values, [heads, length, head_dim], of the first tokens of a row."""
        return [buffer[slot, :, :length] for buffer in self._buffers]

    def keep(self, kept_N: Tensor) -> None:
        """Move the rows at `kept_N` to the first places."""
        for buffer in self._buffers:
            buffer[: len(kept_N)] = buffer[kept_N]

    def resize(self, rows: int, room: int, like: GrowingLayer) -> None:
        """Allocate other buffers and copy the contents."""
        old = self._buffers
        self._buffers = [s.new_zeros((rows, s.shape[1], room, s.shape[3])) for s in like.states()]
        for new, before in zip(self._buffers, old, strict=False):  # there are none yet in a new layer
            new[: before.shape[0], :, : before.shape[2]] = before

    def blank(self) -> None:
        """See `StaticCache.blank`."""
        for buffer in self._buffers:
            buffer.zero_()

    def get_seq_length(self) -> int:
        """Constant, because a value that a model derives from it would be frozen in a recorded step."""
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.room, 0

    def get_max_length(self) -> int:
        return self._cache.room

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise AssertionError("a static cache is filled from prompts before it is used")


class StaticCache(Cache):
    """`StaticLayer`s, and the positions at which all of them write."""

    def __init__(self, layers: int, device: torch.device) -> None:
        self.rows = self.capacity = 0
        """Size of the buffers."""
        self.room = 0
        """Columns that a step attends to, at most `capacity`."""
        self.device = device
        self.rows_R = torch.zeros(0, dtype=torch.int64, device=device)
        self.positions_R = torch.zeros(0, dtype=torch.int64, device=device)
        self.static_layers = [StaticLayer(self) for _ in range(layers)]
        super().__init__(layers=list(self.static_layers))

    def fits(self, rows: int, capacity: int) -> bool:
        """Whether the buffers are large enough."""
        return rows <= self.rows and capacity <= self.capacity

    def resize(self, rows: int, capacity: int, like: GrowingCache) -> None:
        """Allocate larger buffers and copy the contents. like: a cache with the same heads and head sizes."""
        self.rows, self.capacity = max(rows, self.rows), max(capacity, self.capacity)
        self.rows_R = torch.arange(self.rows, device=self.device)
        self.positions_R = torch.zeros(self.rows, dtype=torch.int64, device=self.device)
        for layer, source in zip(self.static_layers, like.growing_layers, strict=True):
            layer.resize(self.rows, self.capacity, source)

    def blank(self) -> None:
        """Set all keys and values to 0."""
        for layer in self.static_layers:
            layer.blank()

    def put(self, slots_N: Tensor, source: GrowingCache, index_N: Tensor, lengths_N: Tensor, longest: int) -> None:
        """Rows `slots_N` become rows `index_N` of `source`. lengths_N: of those rows, which end at its last column."""
        columns = source.get_seq_length()
        columns_T = torch.arange(longest, device=self.device)
        columns_NT = (columns_T + (columns - lengths_N)[:, None]).clamp(max=columns - 1)
        for layer, theirs in zip(self.static_layers, source.growing_layers, strict=True):
            layer.put(slots_N, theirs, index_N[:, None], columns_NT)

    def row(self, slot: int, length: int) -> RowStates:
        """A copy of the states of a row's first `length` tokens."""
        return RowStates.copied([part for layer in self.static_layers for part in layer.row(slot, length)])

    def keep(self, kept_N: Tensor) -> None:
        """See `StaticLayer.keep`."""
        for layer in self.static_layers:
            layer.keep(kept_N)
