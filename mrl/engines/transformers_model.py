"""How a Hugging Face causal language model is called by the `transformers` engine, and what is asked of it."""

from __future__ import annotations

import inspect
from collections.abc import Container, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from mrl.engines.decode_attention import use_grouped_sdpa
from mrl.engines.kv_cache import GrowingCache, has_plain_attention
from mrl.errors import EngineError


class CausalLM:
    """A loaded model (possibly wrapped by PEFT, possibly the actor's own) with one way to run it.

    Raises EngineError for a model the decode loop cannot serve: encoder-decoder, without a selectable cache, without
    explicit positions, PEFT prompt learning, or with fewer positions than `max_model_len`.
    """

    def __init__(self, module: nn.Module, max_model_len: int, autocast_dtype: torch.dtype | None) -> None:
        self.module = module
        self.inner = _without_peft(module)
        self.config = self.inner.config
        accepted = inspect.signature(self.inner.forward).parameters
        text_config = self._text_config = self.config.get_text_config(decoder=True)
        self._check(accepted.keys(), text_config, max_model_len)
        self.plain_attention = has_plain_attention(self.config)
        self.embedding = cast(nn.Embedding, self.inner.get_input_embeddings())
        self.vocab_size = self.embedding.num_embeddings
        self.cache_bytes_per_token = _cache_bytes_per_token(text_config, self.inner.dtype)
        self._autocast_dtype = autocast_dtype
        self._limits_logits = "logits_to_keep" in accepted
        # Two savings for models with full attention in every layer, computed by transformers' `sdpa`: a ready 4D mask
        # spares every decode step the making of one, and `grouped_sdpa` the copying of keys and values.
        self._fast_attention = (
            self.plain_attention
            and text_config._attn_implementation == "sdpa"
            and getattr(self.inner, "_supports_attention_backend", False)
        )

    @property
    def device(self) -> torch.device:
        """Where input ids go."""
        return self.embedding.weight.device

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Evaluation mode without gradients, under autocast if asked for; leaves every training flag as it was.

        Gradient checkpointing acts only in training mode (where it would switch the cache off), so its settings need
        no change. `no_grad` and not `inference_mode`: a module shared with the actor may keep a buffer computed here
        (dynamic rotary frequencies, for one), and the backward pass refuses inference tensors.
        """
        training = [m for m in self.module.modules() if m.training]
        autocast = torch.autocast(self.device.type, self._autocast_dtype) if self._autocast_dtype else nullcontext()
        attention = use_grouped_sdpa(self._text_config) if self._fast_attention else nullcontext()
        for m in training:
            m.training = False
        try:
            with torch.no_grad(), autocast, attention:
                yield
        except torch.OutOfMemoryError as e:
            raise EngineError(f"out of memory; lower max_batch_tokens, max_model_len or max_tokens ({e})") from e
        finally:
            for m in training:
                m.training = True

    def new_cache(self) -> Cache:
        """An empty cache of the kind the model needs."""
        return GrowingCache(self.config) if self.plain_attention else DynamicCache(config=self.config)

    def forward(
        self, ids_BT: Tensor, positions_BT: Tensor, mask_BL: Tensor | None, cache: Cache | None, keep: int
    ) -> Tensor:
        """Logits of the last `keep` columns, [B, keep, V].

        mask_BL: True where a column holds a token, over cached and new columns; `None` = everywhere. cache: extended by
        the new tokens; `None` = nothing came before.
        """
        mask: Tensor | None = mask_BL
        if mask_BL is not None and ids_BT.shape[1] == 1 and self._fast_attention:
            mask = mask_BL[:, None, None, :]
        limit = {"logits_to_keep": keep} if self._limits_logits else {}
        output = self.inner(
            input_ids=ids_BT,
            attention_mask=mask,
            position_ids=positions_BT,
            past_key_values=cache,
            use_cache=cache is not None,
            **limit,
        )
        logits_BKV: Tensor = output.logits
        return logits_BKV if self._limits_logits else logits_BKV[:, -keep:]

    def _check(self, accepted: Container[str], text_config: PreTrainedConfig, max_model_len: int) -> None:
        name = type(self.inner).__name__
        if self.config.is_encoder_decoder:
            raise EngineError(f"{name} is an encoder-decoder; engine 'transformers' serves decoder-only models")
        missing = [a for a in ("attention_mask", "position_ids", "past_key_values") if a not in accepted]
        if missing:
            raise EngineError(
                f"{name}.forward takes no {', '.join(missing)}, which the decode loop needs; use engine 'vllm'"
            )
        positions = getattr(text_config, "max_position_embeddings", None)
        if isinstance(positions, int) and 0 < positions < max_model_len:
            raise EngineError(f"max_model_len={max_model_len} exceeds the {positions} positions {name} was built for")


def _without_peft(module: nn.Module) -> PreTrainedModel:
    """The Hugging Face model itself; LoRA and the like live inside its layers, so nothing is lost by calling it."""
    if hasattr(module, "peft_config") and hasattr(module, "get_base_model"):
        peft_model: Any = module
        if any(config.is_prompt_learning for config in peft_model.peft_config.values()):
            raise EngineError("PEFT prompt learning adds virtual tokens outside the model; use LoRA, or engine 'vllm'")
        module = peft_model.get_base_model()
    if not isinstance(module, PreTrainedModel):
        raise EngineError(f"engine 'transformers' needs a transformers PreTrainedModel, not {type(module).__name__}")
    return module


def _cache_bytes_per_token(text_config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Keys and values of all layers for one token, by the config's usual names (too many where some are missing)."""
    heads = text_config.num_attention_heads
    head_dim = getattr(text_config, "head_dim", None) or text_config.hidden_size // heads
    kv_heads = getattr(text_config, "num_key_value_heads", None) or heads
    return int(2 * text_config.num_hidden_layers * kv_heads * head_dim * dtype.itemsize)
