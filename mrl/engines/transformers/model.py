"""How the `transformers` engine calls a Hugging Face causal language model, and what it requires of it."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Container, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from mrl.engines.transformers.cuda_graphs import CudaGraphs, Recorder
from mrl.engines.transformers.kv_cache import GrowingCache, layer_windows
from mrl.engines.transformers.lean_step import LeanStep, can_be_lean
from mrl.errors import EngineError
from mrl.modeling.precision import Casts, keep_logits_wide, same_weights

if TYPE_CHECKING:
    from mrl.engines.transformers.image_prompts import ImagePrompts

Path = Literal["own steps", "own masks", "model's masks", "model's cache"]
"""How the decode loop runs a model, the fastest first:

- own steps: as "own masks", but `LeanStep` computes steps of one token per row.
- own masks: `GrowingCache`, precomputed 4D masks (one per layer kind and step), and `mrl.modeling.attention`.
- model's masks: `GrowingCache`; the model makes its masks from a 2D padding mask.
- model's cache: all by the model, with the cache that transformers would use. Rows cannot be replaced.
"""

StepKind = Literal["auto", "eager", "static"]
"""`auto`: static on CUDA where the model allows it, else eager."""


class CausalLM:
    """A loaded model (possibly wrapped by PEFT, possibly the actor's own) and how to run it: "model's cache", until
    `mrl.engines.transformers.trial.make_causal_lm` has found a faster path.

    Raises EngineError for a model the decode loop cannot serve: encoder-decoder, without a selectable cache, without
    explicit positions, PEFT prompt learning, or with fewer positions than `max_model_len`.
    """

    def __init__(
        self,
        module: nn.Module,
        max_model_len: int,
        autocast_dtype: torch.dtype | None,
        decode_step: StepKind = "auto",
    ) -> None:
        self.module = module
        self.inner = _without_peft(module)
        self.config = self.inner.config
        accepted = inspect.signature(self.inner.forward).parameters
        text_config = self.text_config = self.config.get_text_config(decoder=True)
        self._check(accepted.keys(), text_config, max_model_len)
        keep_logits_wide(self.inner)
        self.embedding = cast(nn.Embedding, self.inner.get_input_embeddings())
        self.vocab_size = self.embedding.num_embeddings
        self.autocast_dtype = autocast_dtype
        self.limits_logits = "logits_to_keep" in accepted
        self.windows = layer_windows(self.config)
        self.lean = LeanStep(self.inner) if autocast_dtype is None and can_be_lean(self.inner) else None
        """None where `LeanStep` does not support the model."""
        self.path: Path = "model's cache"
        self.decode_step, self._records = decode_step, self.device.type == "cuda"
        self.static = False
        """Whether decoding takes static steps."""
        self.exclusive = False
        """Whether only this engine uses the module. Its tensors then keep their addresses, so recordings stay valid."""
        self.kept_step: Any = None
        """The previous batch's static step, if `exclusive`."""
        self._casts: Casts = {}
        self.images: ImagePrompts | None = None
        """How prompts with images go through it; the engine sets it."""

    @property
    def device(self) -> torch.device:
        """Where input ids go."""
        return self.embedding.weight.device

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Evaluation mode without gradients, under `autocast_dtype`; restores every training flag.

        Gradient checkpointing acts only in training mode (where it would switch the cache off), so its settings need
        no change. `no_grad` and not `inference_mode`: a module shared with the actor may keep a buffer computed here
        (dynamic rotary frequencies, for one), and the backward pass refuses inference tensors.
        """
        training = [m for m in self.module.modules() if m.training]
        autocast: AbstractContextManager[Any] = nullcontext()
        if self.autocast_dtype:
            # Autocast's weight cache is freed on exit, and a recorded step would still read its memory.
            autocast = torch.autocast(self.device.type, self.autocast_dtype, cache_enabled=not self.exclusive)
        for m in training:
            m.training = False
        try:
            with torch.no_grad(), autocast, same_weights(self._casts if self.exclusive else None):
                yield
        except torch.OutOfMemoryError as e:
            raise EngineError(f"out of memory; lower max_decode_rows, max_model_len or max_tokens ({e})") from e
        finally:
            for m in training:
                m.training = True

    @property
    def replaces_rows(self) -> bool:
        """Whether caches are `GrowingCache`s, whose rows can be overwritten by other prompts."""
        return self.path != "model's cache"

    @property
    def cache_bytes_per_token(self) -> int:
        """Keys and values of all layers; see `as_multiplied`."""
        narrow = self.autocast_dtype is not None and self.replaces_rows
        return _cache_bytes_per_token(self.text_config, self.autocast_dtype if narrow else self.inner.dtype)

    def new_cache(self) -> Cache:
        """An empty cache of the kind the model needs."""
        if self.replaces_rows:
            assert self.windows is not None
            return GrowingCache(self.config, self.windows)
        return DynamicCache(config=self.config)

    def new_recorder(self) -> Recorder | None:
        """The recorder for static steps; None = they are called directly."""
        return CudaGraphs(self.device) if self._records else None

    def refuse_recording(self, error: RuntimeError) -> None:
        """Stop recording steps of this model; with `auto`, the next batch takes eager steps."""
        first = (str(error).strip().splitlines() or [""])[0][:200]
        instead = "eager steps follow" if self.decode_step == "auto" else "its static steps run unrecorded, and slower"
        warnings.warn(
            f"decode_step: {type(self.inner).__name__} could not be recorded as a CUDA graph, {instead} "
            f"({type(error).__name__}: {first})",
            stacklevel=2,
        )
        self._records, self.static = False, self.decode_step == "static"

    def forward(
        self,
        ids_BT: Tensor,
        positions_BT: Tensor,
        real_BL: Tensor | None,
        cache: Cache | None,
        keep: int,
        given: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Logits of the last `keep` columns, [B, keep, V].

        positions_BT: each token's position in its row. real_BL: True where a column holds a token and not padding, over
        cached and new columns, in the order of their positions; `None` = everywhere. cache: extended by the new tokens;
        `None` = no past. given: what the model gets instead of ids or positions.
        """
        masks: Any = real_BL
        if self.path in ("own steps", "own masks") and cache is not None:
            masks = self._masks(positions_BT, real_BL, cache.get_seq_length() + ids_BT.shape[1])
        if self.path == "own steps" and isinstance(cache, GrowingCache) and ids_BT.shape[1] == 1:
            assert self.lean is not None
            return self.lean(ids_BT, positions_BT, masks, cache)
        return self._logits(ids_BT, positions_BT, masks, cache, keep, given)

    def step(self, ids_B: Tensor, positions_B: Tensor, columns: int, cache: Cache) -> Tensor:
        """Logits [B, V] after one token per row, for rows that start at the cache's first column. columns: the number
        of cache columns attended to, before masking. Shapes and Python numbers do not depend on `positions_B`."""
        assert self.windows is not None
        behind_BL = positions_B[:, None] - torch.arange(columns, device=ids_B.device)
        masks = {window: self._additive(_within(behind_BL, window)[:, None, None, :]) for window in set(self.windows)}
        return self._logits(ids_B[:, None], positions_B[:, None], _by_kind(masks), cache, keep=1)[:, 0]

    def _logits(
        self,
        ids_BT: Tensor,
        positions_BT: Tensor,
        masks: Any,
        cache: Cache | None,
        keep: int,
        given: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        limit = {"logits_to_keep": keep} if self.limits_logits else {}
        tokens = {"input_ids": ids_BT, "position_ids": positions_BT} | dict(given or {})
        if "inputs_embeds" in tokens:
            del tokens["input_ids"]
        output = self.inner(
            **tokens,
            attention_mask=masks,
            past_key_values=cache,
            use_cache=cache is not None,
            **limit,
        )
        logits_BKV: Tensor = output.logits
        return logits_BKV if self.limits_logits else logits_BKV[:, -keep:]

    def _masks(self, positions_BT: Tensor, real_BL: Tensor | None, columns: int) -> Tensor | dict[str, Tensor] | None:
        """The 4D mask, or one per layer kind, as the model's layers take it; None = no mask needed."""
        assert self.windows is not None
        kinds = set(self.windows)
        if real_BL is None:
            if kinds == {None}:
                return None
            real_BL = torch.ones(len(positions_BT), columns, dtype=torch.bool, device=self.device)
        return _by_kind({window: self._mask(positions_BT, real_BL, window) for window in kinds})

    def _mask(self, positions_BT: Tensor, real_BL: Tensor, window: int | None) -> Tensor:
        """Causal mask [B, 1, T, L], limited to `window`. By positions and not by columns, because there can be padding
        between a shared prefix and the rest of a prompt."""
        if positions_BT.shape[1] == 1:  # the cache then returns only the window's columns
            seen_B1TL = (real_BL if window is None else real_BL[:, -window:])[:, None, None, :]
        else:
            behind_BTL = positions_BT[:, :, None] - (real_BL.cumsum(dim=1) - 1)[:, None, :]
            seen_B1TL = (real_BL[:, None, :] & _within(behind_BTL, window))[:, None]
        return self._additive(seen_B1TL)

    def _additive(self, seen_B1TL: Tensor) -> Tensor:
        if self.device.type != "cpu" or self.autocast_dtype:
            return seen_B1TL
        # On CPU, torch's attention would convert a bool mask in every layer.
        return torch.zeros(seen_B1TL.shape, dtype=self.inner.dtype).masked_fill_(~seen_B1TL, -torch.inf)

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


def _within(behind: Tensor, window: int | None) -> Tensor:
    """Whether a token attends to columns so far behind it."""
    return behind >= 0 if window is None else (behind >= 0) & (behind < window)


def _by_kind(masks: dict[int | None, Tensor]) -> Tensor | dict[str, Tensor]:
    """The masks by window, as models take them: one, or one per layer kind."""
    if len(masks) == 1:
        return next(iter(masks.values()))
    return {"full_attention" if window is None else "sliding_attention": mask for window, mask in masks.items()}


def _without_peft(module: nn.Module) -> PreTrainedModel:
    """The Hugging Face model itself. LoRA layers are inside it, so calling it directly includes the adapter."""
    if hasattr(module, "peft_config") and hasattr(module, "get_base_model"):
        peft_model: Any = module
        if any(config.is_prompt_learning for config in peft_model.peft_config.values()):
            raise EngineError("PEFT prompt learning adds virtual tokens outside the model; use LoRA, or engine 'vllm'")
        module = peft_model.get_base_model()
    if not isinstance(module, PreTrainedModel):
        raise EngineError(f"engine 'transformers' needs a transformers PreTrainedModel, not {type(module).__name__}")
    return module


def _cache_bytes_per_token(text_config: PreTrainedConfig, dtype: torch.dtype | None) -> int:
    """KV cache of one token in all layers, by the config's usual fields (an overestimate where some are missing)."""
    heads = text_config.num_attention_heads
    head_dim = getattr(text_config, "head_dim", None) or text_config.hidden_size // heads
    kv_heads = getattr(text_config, "num_key_value_heads", None) or heads
    return int(2 * text_config.num_hidden_layers * kv_heads * head_dim * (dtype or torch.float32).itemsize)
