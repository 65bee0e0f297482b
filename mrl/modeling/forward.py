"""From rows of tokens to completion logprobs: packed where the model allows it, and without full logits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from mrl.algorithms.logprobs import logprobs_from_logits
from mrl.errors import ModelError
from mrl.modeling.attention import install
from mrl.modeling.evaluating import evaluating
from mrl.modeling.gather import Gather, make_gather
from mrl.modeling.head import find_head
from mrl.modeling.images import ImageModel, ImageReader, ImageTokens
from mrl.modeling.packed_attention import NotPackableError, PackedSequence, pack_rows, watch_windows
from mrl.modeling.precision import keep_logits_wide
from mrl.modeling.token_batch import TokenBatch
from mrl.system.transfers import to_device
from mrl.types import Media, Sample

T = TypeVar("T")
INSIDE = "mrl_inside"
"""Method of a sharded model that calls what it is given while the weights of embeddings and head are gathered."""


@dataclass(frozen=True)
class Layout:
    """Where each trained token of a micro-batch is predicted.

    Token n is completion token `slot_N[n]` of row `row_N[n]`. `sources` gathers the hidden states that predict them,
    from the packed sequence, or without one from the flattened padded rows.
    """

    row_N: Tensor
    slot_N: Tensor
    sources: Gather
    packed: PackedSequence | None
    images: ImagesInRows | None = None


@dataclass(frozen=True)
class ImagesInRows:
    """The images of a micro-batch, and where they are: in the packed sequence, or in the padded rows."""

    tokens: ImageTokens
    keys_BL: np.ndarray
    positions_3BL: Tensor | None
    """None = as those of any tokens."""


class Forward:
    """How a causal language model, and copies of it such as the reference model, compute a `TokenBatch`.

    What the model supports is tested on it, not looked up. `head`: its output head for tiled logprobs, or None where
    the model's own logits are needed (more memory, same numbers). `packs`: whether rows may be packed. processor: of a
    model that takes images (`mrl.models.load_processor`).
    """

    def __init__(self, model: Any, autocast_dtype: torch.dtype | None, *, packing: bool, processor: Any = None) -> None:
        self.device = next(model.parameters()).device
        self.autocast_dtype = autocast_dtype
        with torch.no_grad(), evaluating(model):
            self.head = find_head(causal_lm_of(model), self.device)
            self.packs = packing and packs_exactly(causal_lm_of(model), self.device)
        self.other_precision = True
        """Whether it can be asked for a pass in another precision than `autocast_dtype`."""
        self.images: ImageModel | None = None
        self.no_images = "the model takes no images"
        """Why there is none."""
        if processor is not None:
            try:
                self.images = ImageModel(causal_lm_of(model), ImageReader(processor))
            except ModelError as error:
                self.no_images = str(error)
        if self.head is None:
            keep_logits_wide(causal_lm_of(model))
        self.notices: list[str] = []
        """Messages for the user."""
        name = type(causal_lm_of(model)).__name__
        if packing and not self.packs:
            self.notices.append(f"packing: {name} is trained on padded rows, its attention does not allow packing")
        if self.head is None:
            self.notices.append(
                f"{name} computes its logits in an unknown way: all logits of a micro-batch are in memory"
            )

    def logprobs(
        self, model: Any, tokens: TokenBatch, *, entropy: bool = True, entropy_grad: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Logprobs and entropies of the tokens the policy sampled, at the sampler's temperature; B×T, 0 elsewhere."""
        causal_lm = causal_lm_of(model)
        return inside(causal_lm, lambda: self._logprobs(causal_lm, tokens, entropy, entropy_grad))

    def logits(self, model: Any, tokens: TokenBatch) -> Tensor:
        """All logits of the tokens the policy sampled, before any temperature; N×V in the order of `tokens.mask_BT`,
        float32. For few tokens."""
        causal_lm = causal_lm_of(model)
        return inside(causal_lm, lambda: self._logits(causal_lm, tokens))

    def _logprobs(self, causal_lm: Any, tokens: TokenBatch, entropy: bool, entropy_grad: bool) -> tuple[Tensor, Tensor]:
        layout: Layout = tokens.layout or self._layout(causal_lm, tokens)
        tokens.layout = layout
        targets_N = tokens.completion_BT[layout.row_N, layout.slot_N]
        with self._autocast():
            if self.head is None:
                logits = causal_lm(**self._inputs(causal_lm, tokens, layout)).logits
                logprobs_N, entropy_N = logprobs_from_logits(
                    _predicting(logits, layout), targets_N, tokens.temperature, entropy_grad=entropy_grad
                )
            else:
                hidden = causal_lm.get_decoder()(**self._inputs(causal_lm, tokens, layout)).last_hidden_state
                logprobs_N, entropy_N = self.head.logprobs(
                    causal_lm.get_output_embeddings(),
                    _predicting(hidden, layout),
                    targets_N,
                    tokens.temperature,
                    entropy=entropy,
                    entropy_grad=entropy_grad,
                    compute_dtype=self.autocast_dtype,
                )
        empty_BT = torch.zeros(tokens.mask_BT.shape, device=self.device)
        where = (layout.row_N, layout.slot_N)
        return empty_BT.index_put(where, logprobs_N), empty_BT.index_put(where, entropy_N)

    def _logits(self, causal_lm: Any, tokens: TokenBatch) -> Tensor:
        layout = self._layout(causal_lm, tokens)
        with self._autocast():
            inputs = self._inputs(causal_lm, tokens, layout)
            if self.head is None:
                return _predicting(causal_lm(**inputs).logits, layout).float()
            hidden = causal_lm.get_decoder()(**inputs).last_hidden_state
        return self.head.logits(causal_lm.get_output_embeddings(), _predicting(hidden, layout))

    def _layout(self, causal_lm: Any, tokens: TokenBatch) -> Layout:
        samples = tokens.samples
        slots = [np.flatnonzero(np.asarray(s.mask)) for s in samples]  # `tokens.mask_BT` is on the device
        row_N, slot_N = np.repeat(np.arange(len(slots)), [len(slots_n) for slots_n in slots]), np.concatenate(slots)
        # The last token predicts none of the targets.
        rows = [[*s.prompt_ids, *s.completion_ids[:-1]] for s in samples]
        images = self._images_of(samples)
        keys = rows
        if images is not None:
            keys = [[*images.keys(row, _within(s, row))] for row, s in zip(rows, samples, strict=True)]
        packed, places = None, None
        if self.packs:
            ends = [len(s.prompt_ids) for s in samples]
            packed, places = pack_rows(
                [row[:end] for row, end in zip(keys, ends, strict=True)],
                [row[end:] for row, end in zip(keys, ends, strict=True)],
                self.device,
            )
            before = [place[len(s.prompt_ids) - 1 :] for s, place in zip(samples, places, strict=True)]
            source_N = np.concatenate([place[slots_n] for place, slots_n in zip(before, slots, strict=True)])
        else:
            prompt_N = np.array([len(s.prompt_ids) for s in samples])[row_N]
            source_N = row_N * tokens.ids_BL.shape[1] + prompt_N + slot_N - 1
        row_and_slot_2N = to_device(self.device, torch.from_numpy(np.stack([row_N, slot_N]).astype(np.int64)))
        inside = None if images is None else self._images_in(causal_lm, images, keys, places, tokens.ids_BL.shape[1])
        sources = make_gather(source_N, self.device)
        return Layout(row_and_slot_2N[0], row_and_slot_2N[1], sources, packed, inside)

    def _images_of(self, samples: list[Sample]) -> ImageTokens | None:
        """Raises ModelError for samples with images that the model does not take."""
        if not any(sample.media for sample in samples):
            return None
        if self.images is None:
            raise ModelError(self.no_images)
        return ImageTokens(self.images.reader)

    def _images_in(
        self,
        causal_lm: Any,
        images: ImageTokens,
        keys: list[list[int]],
        places: list[np.ndarray] | None,
        longest: int,
    ) -> ImagesInRows:
        """places: of each row's tokens in the packed sequence; None = in padded rows of the `longest`."""
        assert self.images is not None
        shape = (len(keys), longest)
        if places is not None:
            shape = (1, 1 + max(int(place.max()) for place in places))
        keys_BL = np.zeros(shape, dtype=np.int64)
        positions_3BL = torch.arange(shape[1]).expand(3, *shape).clone() if self.images.turns else None
        for row, row_keys in enumerate(keys):
            at = (row, slice(len(row_keys))) if places is None else (0, places[row])
            keys_BL[at] = row_keys
            if positions_3BL is not None:
                found = self.images.positions(causal_lm, images, tuple(row_keys))
                plain = torch.arange(len(row_keys)).expand(3, -1)
                positions_3BL[:, at[0], at[1]] = plain if found is None else found
        return ImagesInRows(images, keys_BL, None if positions_3BL is None else to_device(self.device, positions_3BL))

    def _inputs(self, causal_lm: Any, tokens: TokenBatch, layout: Layout) -> dict[str, Any]:
        inputs = {"input_ids": tokens.ids_BL, "use_cache": False} if layout.packed is None else layout.packed.inputs()
        if (inside := layout.images) is not None:
            assert self.images is not None
            del inputs["input_ids"]
            inputs["inputs_embeds"] = self.images.embeddings(causal_lm, inside.tokens, inside.keys_BL, keep=False)
            if inside.positions_3BL is not None:
                inputs["position_ids"] = inside.positions_3BL
        return inputs

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.autocast_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.autocast_dtype)


def causal_lm_of(model: Any) -> Any:
    """The Hugging Face model inside a PEFT model; adapters are inside its layers."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def inside(causal_lm: Any, compute: Callable[[], T]) -> T:
    """Compute with the model's parts, such as decoder and head, as if in its own forward pass: weights are gathered."""
    enter = getattr(causal_lm, INSIDE, None)
    if enter is None:
        return compute()
    found: T = enter(compute)
    if not torch.is_grad_enabled():
        causal_lm.reshard()  # no backward pass will
    return found


def packs_exactly(causal_lm: Any, device: torch.device) -> bool:
    """Whether packed rows, with a shared prompt among them, have the same hidden states as each row alone."""
    config = causal_lm.config.get_text_config()
    before = config._attn_implementation
    if not install(config):
        return False
    exactly = _packs_exactly(causal_lm, config, device)
    if not exactly:
        config._attn_implementation = before
    return exactly


def _packs_exactly(causal_lm: Any, config: Any, device: torch.device) -> bool:
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds - {"full_attention", "sliding_attention"} or getattr(config, "attention_chunk_size", None):
        return False  # on a short probe it looks like full attention
    ids = [(7 * i + 3) % config.vocab_size for i in range(24)]
    prompts, completions = [ids[:5], ids[:5], ids[9:12]], [ids[5:9], ids[14:23], ids[11:13]]
    packed, places = pack_rows(prompts, completions, device)
    run = causal_lm.get_decoder()
    try:
        with watch_windows() as windows:
            packed_NH = run(**packed.inputs())[0][0]
        slides = "sliding_attention" in kinds or (
            getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
        )
        if slides and not any(window is not None for window in windows):
            return False  # its window is in the mask, and packed rows have none
        for prompt, completion, place in zip(prompts, completions, places, strict=True):
            row_LH = run(input_ids=torch.tensor([prompt + completion], device=device), use_cache=False)[0][0]
            if not torch.allclose(packed_NH[to_device(device, torch.from_numpy(place))], row_LH, rtol=1e-3, atol=1e-4):
                return False
    except (NotPackableError, TypeError, RuntimeError, AttributeError):
        return False
    return True


def _within(sample: Sample, row: list[int]) -> list[Media]:
    """The sample's images, without one whose last token is also the row's, which is cut off there."""
    return [image for image in sample.media if image.start + image.length <= len(row)]


def _predicting(states: Tensor, layout: Layout) -> Tensor:
    """The states that predict each trained token: from B×L×H, or from a packed sequence's 1×N×H."""
    return layout.sources(states.flatten(0, 1))
