"""The attention function of the models that mrl runs; it chooses a kernel by the arguments of each call.

A model's configuration names its attention function, and all threads that run the model share that configuration. So
the name is set once and stays: swapping it around a call would change other threads' calls too.

- Packed rows (`packed`): see mrl.modeling.packed_attention.
- One new token per row over a padded cache: without repeating grouped keys and values. Transformers' `sdpa` copies them
  to every query head as soon as there is a mask. The heads of a group can be the queries instead, which gives the same
  numbers without the copy: 25 to 40 times as fast on CPU at 14 heads in 2 groups.
- All else: transformers' `sdpa`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

if TYPE_CHECKING:
    from mrl.modeling.packed_attention import PackedSequence

NAME = "mrl"
REPLACED = ("sdpa", NAME)
"""Attention implementations that this function may replace."""
_HANDLED = {"dropout", "scaling", "is_causal", "position_ids", "use_cache", "cache_position", "sliding_window"}
"""Arguments that change nothing for one query per row; a sliding window is in the mask."""


def install(config: PreTrainedConfig) -> bool:
    """Make models of this configuration use this function from now on; results are those of `sdpa`.

    Returns False, and changes nothing, for models that use another attention than `sdpa`.
    """
    if config._attn_implementation not in REPLACED:
        return False
    config._attn_implementation = NAME
    return True


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: PackedSequence | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Same signature as transformers' attention functions, plus `packed`, which the model's caller may pass."""
    if packed is None:
        return grouped_sdpa(module, query, key, value, attention_mask, **kwargs)
    from mrl.modeling.packed_attention import packed_attention

    return packed_attention(module, query, key, value, attention_mask, packed=packed, **kwargs)


def grouped_sdpa(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """transformers' `sdpa`; computed by KV groups when there is one query and no unusual argument.

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


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
