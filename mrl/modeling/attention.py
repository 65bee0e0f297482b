"""The attention of the models that mrl runs: one function, which does what the arguments of each call ask for.

A model's configuration names the attention function it calls, and everybody who runs the model shares that
configuration. So the name is set once and stays: swapping it around a call would change another thread's call, too.

- Rows that are stored without padding (`line`): see mrl.modeling.packed_attention.
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
    from mrl.modeling.packed_attention import Line

NAME = "mrl"
REPLACED = ("sdpa", NAME)
"""What a configuration may name for this function to take its place."""
_HANDLED = {"dropout", "scaling", "is_causal", "position_ids", "use_cache", "cache_position", "sliding_window"}
"""Arguments that change nothing for one query per row; a sliding window is in the mask."""


def install(config: PreTrainedConfig) -> bool:
    """Have models of this configuration attend by this function from now on; the results are those of `sdpa`.

    False for one that attends by something else than `sdpa`: it is left as it is.
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
    line: Line | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """As transformers' attention functions are called, with `line=` where the model's caller gave it one."""
    if line is None:
        return grouped_sdpa(module, query, key, value, attention_mask, **kwargs)
    from mrl.modeling.packed_attention import packed_attention

    return packed_attention(module, query, key, value, attention_mask, line=line, **kwargs)


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


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
