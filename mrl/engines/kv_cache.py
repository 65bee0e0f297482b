"""Key/value caches whose rows can be repeated, dropped and merged.

Models with plain full attention get `GrowingCache`: keys and values are written in place into buffers that grow by
half, where transformers' `DynamicCache` copies everything at every token. Other layer kinds (sliding window, linear
attention, ...) keep transformers' own layers, of which only the row selection is used.
"""

from __future__ import annotations

from typing import Any

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
    """Whether every layer caches full attention, so that `GrowingCache` serves. Raises EngineError if no cache would."""
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
    cache.reorder_cache(index_B)


class GrowingLayer(DynamicLayer):
    """One layer's keys and values, [B, heads, length, head_dim], as views of buffers with room to grow."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append the states of new tokens; returns all keys and all values so far."""
        end = self.length + key_states.shape[2]
        if self._keys is None or self._values is None:
            self._keys, self._values = key_states, value_states
            self.is_initialized = True
        else:
            if end > self._keys.shape[2]:
                self._grow(max(end, self._keys.shape[2] * 3 // 2))
            self._keys[:, :, self.length : end] = key_states
            self._values[:, :, self.length : end] = value_states
        self.length = end
        return self._keys[:, :, :end], self._values[:, :, :end]

    def get_seq_length(self) -> int:
        return self.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        assert self._keys is not None and self._values is not None
        self._keys = self._keys.index_select(0, beam_idx)
        self._values = self._values.index_select(0, beam_idx)

    def start(self, rows: int, like: GrowingLayer, length: int, capacity: int) -> None:
        """Become `rows` empty rows of `length` tokens (zeros, to be masked out or filled), with room for `capacity`."""
        assert like._keys is not None and like._values is not None
        self._keys = like._keys.new_zeros(rows, like._keys.shape[1], capacity, like._keys.shape[3])
        self._values = like._values.new_zeros(rows, like._values.shape[1], capacity, like._values.shape[3])
        self.length = length
        self.is_initialized = True

    def fill(self, rows: slice, source: GrowingLayer, index_B: Tensor) -> None:
        """Put the source's rows at `index_B` into `rows`, right-aligned with this layer's length."""
        assert self._keys is not None and self._values is not None
        assert source._keys is not None and source._values is not None
        columns = slice(self.length - source.length, self.length)
        self._keys[rows, :, columns] = source._keys[:, :, : source.length].index_select(0, index_B)
        self._values[rows, :, columns] = source._values[:, :, : source.length].index_select(0, index_B)

    def _grow(self, capacity: int) -> None:
        assert self._keys is not None and self._values is not None
        keys, values = self._keys, self._values
        self._keys = keys.new_zeros(*keys.shape[:2], capacity, keys.shape[3])
        self._values = values.new_zeros(*values.shape[:2], capacity, values.shape[3])
        self._keys[:, :, : self.length] = keys[:, :, : self.length]
        self._values[:, :, : self.length] = values[:, :, : self.length]


class GrowingCache(DynamicCache):
    """A `DynamicCache` of `GrowingLayer`s."""

    layers: list[GrowingLayer]

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config=config)
        self.layers = [GrowingLayer() for _ in self.layers]

    @classmethod
    def merge(cls, config: PreTrainedConfig, parts: list[tuple[GrowingCache, Tensor]], capacity: int) -> GrowingCache:
        """One cache of all parts' rows below each other, each part's rows picked by its index and left-padded.

        parts: caches that have seen equal or fewer tokens, with the rows to take (repeats allowed). Columns before a
        shorter part's tokens are zeros, which the attention mask has to leave out. capacity: tokens to make room for.
        """
        merged = cls(config)
        length = max(part.get_seq_length() for part, _ in parts)
        rows = sum(len(index_B) for _, index_B in parts)
        for number, layer in enumerate(merged.layers):
            layer.start(rows, parts[0][0].layers[number], length, capacity)
            first = 0
            for part, index_B in parts:
                layer.fill(slice(first, first + len(index_B)), part.layers[number], index_B)
                part.layers[number] = GrowingLayer()  # its memory is free from here on
                first += len(index_B)
        return merged
