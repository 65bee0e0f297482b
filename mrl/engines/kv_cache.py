"""Key/value caches whose rows can be repeated, dropped and merged.

Models with plain full attention get `GrowingCache`: keys and values are written in place into buffers that grow by
half, where transformers' `DynamicCache` copies everything at every token. Other layer kinds (sliding window, linear
attention, ...) keep transformers' own layers, of which only the row selection is used.
"""

from __future__ import annotations

from typing import Any, cast

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


def has_plain_attention(config: PreTrainedConfig) -> bool:
    """Whether every layer caches full attention, so that `GrowingCache` serves. EngineError if no cache would."""
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
    return all(type(layer) is DynamicLayer for layer in layers)


def select_rows(cache: Cache, index_B: Tensor) -> None:
    """Keep the rows at `index_B` (repeats allowed), in that order."""
    cache.reorder_cache(cast(torch.LongTensor, index_B))


class GrowingLayer(DynamicLayer):
    """One layer's keys and values, [B, heads, length, head_dim], as views of two buffers with room to grow."""

    def __init__(self) -> None:
        super().__init__()
        self.length = 0
        self._buffers: list[Tensor] = []

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append the states of new tokens; returns all keys and all values so far."""
        end = self.length + key_states.shape[2]
        if not self._buffers:
            self._buffers = [key_states, value_states]
            self.is_initialized = True
        else:
            capacity = self._buffers[0].shape[2]
            if end > capacity:
                self._grow(max(end, capacity * 3 // 2))
            for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
                buffer[:, :, self.length : end] = states
        self.length = end
        keys, values = self._buffers
        return keys[:, :, :end], values[:, :, :end]

    def get_seq_length(self) -> int:
        return self.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._buffers = [buffer.index_select(0, beam_idx) for buffer in self._buffers]

    def merge(self, parts: list[tuple[GrowingLayer, Tensor]], length: int, capacity: int) -> None:
        """Take the parts' rows at their indices, each right-aligned at `length` with zeros before it."""
        rows = sum(len(index_B) for _, index_B in parts)
        self._buffers = [b.new_zeros(rows, b.shape[1], capacity, b.shape[3]) for b in parts[0][0]._buffers]
        self.length, self.is_initialized = length, True
        first = 0
        for part, index_B in parts:
            for buffer, source in zip(self._buffers, part._buffers, strict=True):
                taken = source[:, :, : part.length].index_select(0, index_B)
                buffer[first : first + len(index_B), :, length - part.length : length] = taken
            part._buffers = []  # its memory is free from here on
            first += len(index_B)

    def _grow(self, capacity: int) -> None:
        grown = [b.new_zeros(*b.shape[:2], capacity, b.shape[3]) for b in self._buffers]
        for new, old in zip(grown, self._buffers, strict=True):
            new[:, :, : self.length] = old[:, :, : self.length]
        self._buffers = grown


class GrowingCache(DynamicCache):
    """A `DynamicCache` of `GrowingLayer`s."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config=config)
        self.layers = [GrowingLayer() for _ in self.layers]

    @property
    def growing_layers(self) -> list[GrowingLayer]:
        """The layers by their own type."""
        return cast(list[GrowingLayer], self.layers)

    @classmethod
    def merge(cls, config: PreTrainedConfig, parts: list[tuple[GrowingCache, Tensor]], capacity: int) -> GrowingCache:
        """One cache of all parts' rows below each other, each part's rows picked by its index and left-padded.

        parts: caches with the rows to take (repeats allowed); they are emptied. Columns before a shorter part's tokens
        are zeros, which the attention mask has to leave out. capacity: tokens to make room for at first.
        """
        merged = cls(config)
        length = max(part.get_seq_length() for part, _ in parts)
        for number, layer in enumerate(merged.growing_layers):
            layer.merge([(part.growing_layers[number], index_B) for part, index_B in parts], length, capacity)
        return merged
