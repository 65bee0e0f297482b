"""A decode step for Llama-like models on CPU, written out in cheaper operations.

For one new token per row without gradients, transformers' general forward calls about as many operations, but more
expensive ones, through more Python:

- Norms compute the mean of squares as a matrix product; with torch's sum over few numbers a norm takes 1.7 times as
  long.
- Queries and keys are rotated together, by one shift and two multiplications.
- Attention is two batched products and a softmax. Torch's fused attention is made for many queries per row: with one it
  took 3.6 to 1.7 times as long (two cores of an AMD EPYC, 64 rows, 50 to 180 columns).

Embedding, linear layers, activation and rotary frequencies are the model's own modules, so adapters act and scaled
frequencies are right.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mrl.engines.transformers.kv_cache import GrowingCache, GrowingLayer

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Model types whose layers are exactly norm, attention, norm, gated feed-forward."""


def can_be_lean(model: PreTrainedModel) -> bool:
    """Whether `LeanStep` supports this class of model: in float32 on a CPU, without hooks on the layers it skips.

    The caller has to test whether it gives the model's logits.
    """
    kinds = {f"transformers.models.{family}.modeling_{family}" for family in FAMILIES}
    if type(model).__module__ not in kinds or not type(model).__name__.endswith("ForCausalLM"):
        return False
    passed_over = [
        module for module in model.modules() if type(module).__module__ in kinds and not isinstance(module, nn.Linear)
    ]
    watched = any(
        module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module) for module in passed_over
    )
    return model.dtype == torch.float32 and model.device.type == "cpu" and not watched


class LeanStep:
    """Logits after one more token per row, of a model that `can_be_lean` and has full attention in every layer.

    Shapes: B rows, H hidden, X heads of queries (h) and keys (g) together, D head width, G = B·g, n = h/g queries to
    a key, L columns of the cache.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model: Any = model
        config = model.config
        self.heads: int = config.num_attention_heads
        self.groups: int = config.num_key_value_heads
        self.width: int = self.model.model.layers[0].self_attn.head_dim
        self.eps = torch.tensor([float(config.rms_norm_eps)])
        self.means = {size: torch.full((size, 1), 1 / size) for size in (config.hidden_size, self.width)}
        """By size of a dimension: the matrix [size, 1] that computes the mean over it."""

    def __call__(self, ids_B1: Tensor, positions_B1: Tensor, mask_B11L: Tensor | None, cache: GrowingCache) -> Tensor:
        """Logits [B, 1, V]; `cache` is extended. mask: additive, over cached and new columns; None = all are seen."""
        decoder = self.model.model
        hidden_BH = decoder.embed_tokens(ids_B1)[:, 0]
        cos_B1D, sin_B1D = decoder.rotary_emb(hidden_BH, positions_B1)
        sin_B1D[..., : self.width // 2].neg_()  # rotate_half negates the half that moves to the front
        mask_GnL = None
        if mask_B11L is not None:
            mask_GnL = mask_B11L.expand(-1, self.groups, self.heads // self.groups, -1).flatten(0, 1)
        for layer, past in zip(decoder.layers, cache.growing_layers, strict=True):
            states_BH = self._norm(hidden_BH, layer.input_layernorm)
            states_BH = self._attention(layer.self_attn, states_BH, cos_B1D, sin_B1D, mask_GnL, past)
            hidden_BH = hidden_BH + states_BH
            states_BH = self._norm(hidden_BH, layer.post_attention_layernorm)
            mlp = layer.mlp
            hidden_BH += mlp.down_proj(mlp.act_fn(mlp.gate_proj(states_BH)) * mlp.up_proj(states_BH))
        return cast(Tensor, self.model.lm_head(self._norm(hidden_BH, decoder.norm)))[:, None]

    def _attention(
        self,
        attention: Any,
        states_BH: Tensor,
        cos_B1D: Tensor,
        sin_B1D: Tensor,
        mask_GnL: Tensor | None,
        past: GrowingLayer,
    ) -> Tensor:
        heads, groups, width = self.heads, self.groups, self.width
        query_key_BF = torch.cat((attention.q_proj(states_BH), attention.k_proj(states_BH)), dim=1)
        query_key_BXD = query_key_BF.view(-1, heads + groups, width)
        if hasattr(attention, "q_norm"):
            parts_BXD = query_key_BXD.split((heads, groups), dim=1)
            norms = (attention.q_norm, attention.k_norm)
            query_key_BXD = torch.cat(
                [self._norm(part, norm) for part, norm in zip(parts_BXD, norms, strict=True)], dim=1
            )
        rotated_BXD = query_key_BXD.roll(width // 2, -1).mul_(sin_B1D).addcmul_(query_key_BXD, cos_B1D)
        value_BgD = attention.v_proj(states_BH).view(-1, groups, width)
        keys, values = past.update(rotated_BXD[:, heads:, None], value_BgD[:, :, None])
        query_GnD = (rotated_BXD[:, :heads] * attention.scaling).view(-1, heads // groups, width)
        scores_GnL = torch.bmm(query_GnD, keys.flatten(0, 1).transpose(1, 2))
        if mask_GnL is not None:
            scores_GnL += mask_GnL
        seen_GnD = torch.bmm(scores_GnL.softmax(dim=-1), values.flatten(0, 1))
        return cast(Tensor, attention.o_proj(seen_GnD.view(-1, heads * width)))

    def _norm(self, states: Tensor, norm: Any) -> Tensor:
        """RMSNorm over the last dimension."""
        squares = states.square().view(-1, states.shape[-1])
        scale = torch.addmm(self.eps, squares, self.means[states.shape[-1]]).rsqrt_()
        return (states * norm.weight).mul_(scale.view(*states.shape[:-1], 1))
