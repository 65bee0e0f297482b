"""Attention of one new token per row over a padded cache, without repeating grouped keys and values.

Transformers' `sdpa` copies keys and values to every query head as soon as there is a mask. For one query per row the
heads of a group can be the queries instead, which gives the same numbers without the copy: 25 to 40 times as fast on
CPU at 14 heads in 2 groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

_NAME = "mrl_grouped_sdpa"
_HANDLED = {"dropout", "scaling", "is_causal", "position_ids", "use_cache", "cache_position", "sliding_window"}
"""Arguments that change nothing for one query per row; a sliding window is in the mask."""


def grouped_sdpa(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """transformers' `sdpa` for every input; computed by groups where there is one query and nothing unusual is asked.

    query: [B, heads, 1, D]; key, value: [B, groups, L, D]; attention_mask: bool or additive, [B, 1, 1, L] or None.
    Returns ([B, 1, heads, D], None).
    """
    batch, heads, queries, width = query.shape
    groups = key.shape[1]
    unusual = any(v is not None and name not in _HANDLED for name, v in kwargs.items())
    if queries != 1 or heads == groups or unusual or (attention_mask is not None and attention_mask.shape[1] != 1):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    output = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(batch, groups, heads // groups, width),
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=kwargs.get("dropout", 0.0),
        scale=kwargs.get("scaling"),
    )
    return output.reshape(batch, 1, heads, value.shape[-1]), None


@contextmanager
def use_grouped_sdpa(config: PreTrainedConfig) -> Iterator[None]:
    """Let models of this config attend by `grouped_sdpa` meanwhile; their results are those of `sdpa`."""
    before = config._attn_implementation
    config._attn_implementation = _NAME
    try:
        yield
    finally:
        config._attn_implementation = before


AttentionInterface.register(_NAME, grouped_sdpa)
AttentionMaskInterface.register(_NAME, sdpa_mask)
