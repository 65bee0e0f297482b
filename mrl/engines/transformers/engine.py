"""Engine `transformers`: samples from a Hugging Face causal language model with a decode loop of its own.

It needs nothing but torch and transformers, runs on any of their devices, and can sample from the very module the actor
trains, which makes weight sync free.
"""

from __future__ import annotations

import asyncio
import functools
import os
from typing import TYPE_CHECKING, Self

import torch

from mrl.engines.requests import check_sequence, eos_ids, refusal
from mrl.engines.transformers.decode import decode
from mrl.engines.transformers.decode_calls import Call, DecodeThread
from mrl.engines.transformers.decode_queue import Limits, RequestState, request_states
from mrl.engines.transformers.image_prompts import ImagePrompts
from mrl.engines.transformers.model import CausalLM, StepKind
from mrl.engines.transformers.prefix_cache import PrefixCache
from mrl.engines.transformers.score import score
from mrl.engines.transformers.stop_strings import StopStrings
from mrl.engines.transformers.trial import make_causal_lm
from mrl.engines.transformers.weights import load_directory
from mrl.errors import EngineError, SyncError
from mrl.modeling.precision import narrow_matrices
from mrl.models import autocast_dtype, context_length, load_model, load_processor, load_tokenizer, pick_device
from mrl.system.memory import claim, rounded, unclaimed
from mrl.types import Completion, GenerateRequest, TokenSequence, WeightRef
from mrl.weights.hub_names import to_hub

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

    from mrl.config import ModelConfig


class TransformersEngine:
    """One policy in this process, on the model's device.

    model: a loaded causal language model, possibly wrapped by PEFT, possibly the actor's own. It is switched to
        evaluation while it is used and back afterwards; the actor must not train it at the same time.
    tokenizer: for stop strings and its end-of-sequence id; `None` if neither is needed.
    max_model_len: tokens of prompt and completion together; a completion that reaches it ends with reason "length".
    max_batch_tokens: rows x longest possible length decoded together. Default: what a quarter of the machine's memory
        holds of this model's keys and values, or half of what is free on the GPU and no other engine of this process
        will take; at most 2**20.
    max_rows: completions decoded together; others wait for a free row. Default: as many as have 2**27 (2**29 on GPU)
        logits together. Neither bound changes what is sampled.
    prefix_bytes: memory for the keys and values of conversations between their turns (requests with a `session`),
        beside that of `max_batch_tokens`; 0 = none are kept. Default: an eighth of the machine's memory, or of what is
        free on the GPU.
    endless: requests may keep coming while others decode, so the engine gets its own thread and states how many it
        decodes at a time (`capacity`); otherwise engines of one process take turns, and each takes any number.
    autocast_dtype: run the model under `torch.autocast` in this dtype; sampling stays in float32.
    decode_step: `eager` (a cache that grows), `static` (one of fixed size; on CUDA recorded as CUDA graphs), or `auto`:
        static on CUDA, for models that can.
    version: the policy version the model holds now.
    processor: what makes pixels of images, for models that take them (`mrl.models.load_processor`).

    Raises EngineError when the model cannot be served: see `make_causal_lm`.
    """

    takes_images = True
    """Where the model does."""

    def __init__(
        self,
        model: PreTrainedModel | nn.Module,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        max_model_len: int,
        max_batch_tokens: int | None = None,
        max_rows: int | None = None,
        prefix_bytes: int | None = None,
        endless: bool = False,
        autocast_dtype: torch.dtype | None = None,
        decode_step: StepKind = "auto",
        version: int = 0,
        processor: ProcessorMixin | None = None,
    ) -> None:
        if max_model_len < 2:
            raise EngineError(f"max_model_len={max_model_len} leaves no room for a prompt and a completion token")
        self.version = version
        self._stop_strings = StopStrings(tokenizer)
        self._max_model_len = max_model_len
        self._autocast_dtype, self._decode_step = autocast_dtype, decode_step
        self._lm: CausalLM | None = make_causal_lm(model, max_model_len, autocast_dtype, decode_step)
        self._limits = _limits(self._lm, max_model_len, max_batch_tokens, max_rows)
        self._prefixes = PrefixCache(_memory(self._lm) // 8 if prefix_bytes is None else prefix_bytes)
        self._claimed = self._limits.max_batch_tokens * self._lm.cache_bytes_per_token
        claim(self, self._lm.device, self._claimed)
        self._eos_ids = _eos_ids(self._lm, tokenizer)
        self._images = None if processor is None else ImagePrompts(processor, self._lm.inner)
        self._attach_images()
        self.capacity = self._limits.max_rows if endless else None
        self._thread = DecodeThread(self._decode, self._request_states, endless=endless)

    @classmethod
    def create(cls, config: ModelConfig, module: nn.Module | None = None, *, endless: bool = False) -> Self:
        """An engine for the configured model at version 0, around `module` if that is given.

        Raises ModelError when the model or tokenizer cannot be loaded, EngineError when the model cannot be served.
        """
        model: nn.Module
        if module is None:
            dtype = autocast_dtype(config, pick_device(config.device))
            model = load_model(config, before_moving=functools.partial(narrow_matrices, dtype=dtype))
        else:
            model = module
        device = next(model.parameters()).device
        engine = cls(
            model,
            load_tokenizer(config),
            max_model_len=context_length(model.config, config.max_model_len),
            max_rows=config.max_decode_rows,
            prefix_bytes=None if config.prefix_cache_gb is None else int(config.prefix_cache_gb * 2**30),
            endless=endless,
            autocast_dtype=autocast_dtype(config, device),
            decode_step=config.decode_step,
            processor=load_processor(config),
        )
        engine._model.exclusive = module is None
        return engine

    async def generate(self, requests: list[GenerateRequest]) -> list[Completion]:
        """Sample one completion per request, in the order of the requests; see `mrl.engines.base.Engine.generate`.

        Stops at the model's end-of-sequence ids, `stop_token_ids` (both kept as last token), `stop` strings, or
        `max_tokens` / `max_model_len` (reason "length"). Raises EngineError when closed.
        """
        return await self._thread.generate(requests)

    async def logprobs(self, sequences: list[TokenSequence]) -> list[list[float]]:
        """Logprob of every completion token at the sequence's temperature (no top-p, top-k, min-p).

        Raises EngineError for an empty prompt, ids outside the vocabulary, a sequence beyond `max_model_len`, or a
        temperature that is not above 0.
        """

        def run() -> list[list[float]]:
            lm = self._model
            images = self._images if self._images is not None and not self._images.problem else None
            for number, sequence in enumerate(sequences):
                check_sequence(number, sequence, self._max_model_len, lm.vocab_size, images=images is not None)
            with lm.inference():
                keyed = sequences if images is None else [images.keyed(sequence) for sequence in sequences]
                return score(lm, keyed, self._limits.prefill_tokens)

        found: list[list[float]] = await asyncio.wrap_future(self._thread.run(run))
        return found

    def load_weights(self, ref: WeightRef) -> int:
        """Make `ref` the active policy and return its version.

        A module is used as it is, without a copy. A directory of safetensors is copied into the engine's module, even
        if others share it. Running requests stop between two tokens and continue under the new weights, with their KV
        cache recomputed; their completions then have a version per token. Raises SyncError; the old weights are then
        unchanged.
        """

        def load() -> int:
            lm = self._model
            self._prefixes.clear()
            if self._images is not None:
                self._images.forget_features()
            if ref.module is not None:
                self._adopt(ref.module)
            elif ref.path is not None:
                load_directory(lm.module, ref.path)
            else:
                raise SyncError(f"the reference to version {ref.version} has neither a module nor a path")
            self.version = ref.version
            return self.version

        try:
            return int(self._thread.run(load, urgent=True).result())
        except EngineError as error:
            raise SyncError(f"weights of version {ref.version} could not be loaded: {error}") from error

    async def sampled_tokens(self) -> int:
        """Tokens sampled so far; on an accelerator a few more than in the completions, while a batch decodes."""
        return self._thread.sampled

    def state_dict(self) -> dict[str, Tensor]:
        """Its tensors by Hugging Face name, tied ones under each name. They are live, except those that files store in
        other shapes. Raises EngineError with a PEFT adapter, whose merged tensors do not exist."""
        if self._lm is None:
            raise EngineError("the engine is closed")
        if self._lm.inner is not self._lm.module:
            raise EngineError("a model with a PEFT adapter has no tensors of its merged weights to show")
        inner = self._lm.inner
        return to_hub(inner, {name: tensor.detach() for name, tensor in inner.state_dict().items()})

    def close(self) -> None:
        """End running calls with EngineError, then release model and thread. Calling it twice is allowed."""
        self._thread.close()
        self._lm = None
        self._prefixes = PrefixCache(0)  # not cleared: what decodes now uses it until it ends

    def _adopt(self, module: nn.Module) -> None:
        assert self._lm is not None
        if module is self._lm.module:
            return
        try:
            self._lm = make_causal_lm(module, self._max_model_len, self._autocast_dtype, self._decode_step)
        except EngineError as e:
            raise SyncError(f"the module sent as new policy cannot be served: {e}") from e
        self._attach_images()

    def _attach_images(self) -> None:
        if self._lm is None or self._images is None:
            return
        self._lm.images = self._images
        if self._images.shifts and self._lm.static:
            if self._decode_step == "static":
                raise EngineError(
                    f"decode_step: {type(self._lm.inner).__name__} has positions in several dimensions, which static "
                    "steps do not know; use auto or eager"
                )
            self._lm.static = False

    def _request_states(self, call: Call) -> list[RequestState]:
        lm, stops = self._model, self._stop_strings.has_tokenizer
        if any(request.session is not None for request in call.requests):
            claim(self, lm.device, self._claimed + self._prefixes.max_bytes)

        images = self._images
        problem = "the model takes none" if images is None else images.problem

        def refuse(request: GenerateRequest) -> Completion | None:
            return refusal(
                *(request, self._max_model_len, lm.vocab_size),
                version=self.version,
                stop_strings=stops,
                no_images=problem,
            )

        states = request_states(call, self._max_model_len, refuse)
        return states if images is None else images.with_keys(states, version=self.version)

    def _decode(self, states: list[RequestState], calls: DecodeThread) -> list[RequestState]:
        lm = self._model
        if self._images is not None:
            self._images.keep_only([state.request for state in states])
        with lm.inference():
            return decode(
                lm,
                states,
                calls,
                limits=self._limits,
                eos_ids=self._eos_ids,
                stop_strings=self._stop_strings,
                version=self.version,
                prefixes=self._prefixes,
            )

    @property
    def _model(self) -> CausalLM:
        if self._lm is None:
            raise EngineError("the engine is closed")
        return self._lm


def _limits(lm: CausalLM, max_model_len: int, max_batch_tokens: int | None, max_rows: int | None) -> Limits:
    """On a CPU derived from total and not from free memory, so that the same machine batches alike in every run."""
    if max_batch_tokens is not None and max_batch_tokens < max_model_len:
        raise EngineError(f"max_batch_tokens={max_batch_tokens} is less than max_model_len={max_model_len}")
    if max_rows is not None and max_rows < 1:
        raise EngineError(f"max_rows={max_rows}: at least one completion has to be decoded at a time")
    on_gpu = unclaimed(lm.device) is not None
    fit = _memory(lm) // (2 if on_gpu else 4) // lm.cache_bytes_per_token
    default = max(max_model_len, min(1 << 20, rounded(fit) if on_gpu else fit))
    return Limits(
        max_model_len=max_model_len,
        max_batch_tokens=max_batch_tokens or default,
        max_rows=max_rows or max(1, (1 << 29 if on_gpu else 1 << 27) // lm.vocab_size),
        prefill_tokens=max(max_model_len, 1 << 15 if on_gpu else 1 << 13),
    )


def _memory(lm: CausalLM) -> int:
    """Bytes to plan with: of a GPU what is free, else all that the machine has."""
    free = unclaimed(lm.device)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if free is None else free


def _eos_ids(lm: CausalLM, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """End-of-sequence ids of the generation config, the model's config and the tokenizer together."""
    generation_config = getattr(lm.inner, "generation_config", None)
    return eos_ids((generation_config, lm.config, lm.config.get_text_config(decoder=True), tokenizer))
