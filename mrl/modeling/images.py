"""Images among a model's tokens: which are theirs, what stands there instead of embeddings, and at what positions.

An image's tokens get negative ids of their own in the place of the placeholder's, one for each image and each of its
tokens: equal images have equal ids, different ones different ids. So whatever compares, shares or packs token ids
treats images right without knowing of them, and the negative ids say which features the model is given there.

    prompt ids + Media ─▶ keys ─▶ (shared, packed, cached like any tokens) ─▶ embeddings, and positions where the model
    has them in several dimensions (Qwen-VL)
"""

from __future__ import annotations

import inspect
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mrl.data.images import open_image
from mrl.errors import DataError, ModelError
from mrl.modeling.gather import make_gather
from mrl.models import image_token_id
from mrl.system.transfers import to_device
from mrl.types import Media

Keys = tuple[int, ...]
"""Token ids, with a negative one for each token of an image."""

KEPT_BYTES = 1 << 28
"""Of pixels that are kept, so that the attempts at a task prepare its images once."""


@dataclass(frozen=True)
class Pixels:
    """An image as the model's processor makes it."""

    values: dict[str, Tensor]
    """What the model takes of it: `pixel_values`, and e.g. `image_grid_thw`."""
    tokens: int
    """How many of the prompt's tokens have its features."""

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for value in self.values.values())


class ImageReader:
    """From encoded images to pixels, by a model's processor (`mrl.models.load_processor`)."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        self.token_id = image_token_id(processor)
        self._kept: OrderedDict[str, Pixels] = OrderedDict()
        self._bytes = 0

    def pixels(self, media: Media) -> Pixels:
        """Raises DataError for an image that cannot be read or is of a shape that the processor refuses."""
        found = self._kept.get(media.sha256)
        if found is None:
            found = self._kept[media.sha256] = self._made(open_image(media.data))
            self._bytes += found.nbytes
        self._kept.move_to_end(media.sha256)
        while self._bytes > KEPT_BYTES and len(self._kept) > 1:
            self._bytes -= self._kept.popitem(last=False)[1].nbytes
        return found

    def _made(self, image: Any) -> Pixels:
        try:
            made = self.processor.image_processor([image], return_tensors="pt")
            text = self.processor.replace_image_token(made, 0)
        except (ValueError, RuntimeError) as error:
            raise DataError(f"the model's processor does not take an image of {image.size}: {error}") from error
        return Pixels({name: made[name] for name in made}, text.count(self.processor.image_token))


@dataclass
class ImageTokens:
    """The images that somebody has among tokens, and the model's features of them."""

    reader: ImageReader
    places: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By hash: the first of an image's numbers, and how many it has. They stay, for caches are known by them."""
    media: dict[str, Media] = field(default_factory=dict)
    """By hash: the images in use."""
    features: dict[str, Tensor] = field(default_factory=dict)
    """By hash: of weights that stay the same."""
    _firsts: list[int] = field(default_factory=list)
    _hashes: list[str] = field(default_factory=list)
    _next: int = 0

    def keys(self, ids: Sequence[int], media: Iterable[Media]) -> Keys:
        """`ids` with the images' tokens in their places. Raises DataError where they are not what the processor makes
        of the images."""
        keys = list(ids)
        for image in media:
            first, count = self._place_of(image)
            at = range(image.start, min(image.start + image.length, len(keys)))
            found = [place for place in at if ids[place] == self.reader.token_id]
            if len(found) != count or image.start + image.length > len(keys):
                raise DataError(
                    f"an image has {count} tokens, and the prompt {len(found)} for it at {image.start} to "
                    f"{image.start + image.length}: it was made with another processor"
                )
            for number, place in enumerate(found):
                keys[place] = -1 - first - number
        return tuple(keys)

    def rest_of(self, key: int) -> list[int]:
        """The keys of the same image that follow a key."""
        number = -1 - key
        first, count = self.places[self._hash_of(number)]
        return [-1 - later for later in range(number + 1, first + count)]

    def image_of(self, key: int) -> tuple[Media, int]:
        """The image that a key belongs to, and the number of its token."""
        sha256 = self._hash_of(-1 - key)
        return self.media[sha256], -1 - key - self.places[sha256][0]

    def keep_only(self, used: set[str]) -> None:
        """Forget images that nobody uses any more; they keep their numbers."""
        self.media = {sha256: image for sha256, image in self.media.items() if sha256 in used}
        self.features = {sha256: states for sha256, states in self.features.items() if sha256 in used}

    def _place_of(self, image: Media) -> tuple[int, int]:
        if image.sha256 not in self.places:
            count = self.reader.pixels(image).tokens
            self.places[image.sha256] = self._next, count
            self._firsts.append(self._next)
            self._hashes.append(image.sha256)
            self._next += count
        self.media.setdefault(image.sha256, image)
        return self.places[image.sha256]

    def _hash_of(self, number: int) -> str:
        return self._hashes[bisect_right(self._firsts, number) - 1]


class ImageModel:
    """What a model does with images. Raises ModelError where it does more than put their features among the embeddings,
    or nothing that is known.

    causal_lm: the model itself, inside any PEFT model. Copies of it, such as the reference model, do the same.
    """

    def __init__(self, causal_lm: Any, reader: ImageReader) -> None:
        self.reader = reader
        self.name = type(causal_lm).__name__
        if not hasattr(causal_lm, "get_image_features"):
            raise ModelError(f"{self.name} has no get_image_features, by which its images could be read")
        self.taken = [name for name in inspect.signature(causal_lm.get_image_features).parameters if name != "kwargs"]
        self.turns = callable(getattr(getattr(causal_lm, "model", None), "get_rope_index", None))
        """Whether positions have several dimensions."""
        self._check(causal_lm)

    def features(self, causal_lm: Any, media: Media) -> Tensor:
        """What stands in the place of its tokens' embeddings, [tokens, H]."""
        pixels, device = self.reader.pixels(media), causal_lm.get_input_embeddings().weight.device
        values = {name: to_device(device, value) for name, value in pixels.values.items() if name in self.taken}
        found = causal_lm.get_image_features(**values, return_dict=True).pooler_output
        parts = list(found) if isinstance(found, list | tuple) else [found]
        features_NH = torch.cat([part.flatten(0, -2) for part in parts])
        if len(features_NH) != pixels.tokens:
            raise ModelError(f"{self.name} has {len(features_NH)} features of an image of {pixels.tokens} tokens")
        return features_NH

    def embeddings(self, causal_lm: Any, images: ImageTokens, keys_BT: np.ndarray, *, keep: bool) -> Tensor:
        """The input embeddings of keys, [B, T, H].

        keep: features are kept in `images`, for weights that stay the same. Otherwise they have gradients.
        """
        embed = causal_lm.get_input_embeddings()
        device = embed.weight.device
        embeddings_BTH = embed(to_device(device, torch.from_numpy(keys_BT.clip(min=0).astype(np.int64))))
        place_P = np.flatnonzero(keys_BT < 0)
        if not len(place_P):
            return embeddings_BTH
        tables, row_P, begin = [], np.empty(len(place_P), dtype=np.int64), {}
        length = 0
        for at, key in enumerate(keys_BT.flat[place_P].tolist()):
            media, number = images.image_of(key)
            if media.sha256 not in begin:
                table_NH = images.features.get(media.sha256)
                if table_NH is None:
                    table_NH = self.features(causal_lm, media)
                    if keep:
                        images.features[media.sha256] = table_NH
                tables.append(table_NH)
                begin[media.sha256], length = length, length + len(table_NH)
            row_P[at] = begin[media.sha256] + number
        features_PH = make_gather(row_P, device)(torch.cat(tables).to(embeddings_BTH.dtype))
        flat_MH = embeddings_BTH.flatten(0, 1)
        flat_MH = flat_MH.index_copy(0, to_device(device, torch.from_numpy(place_P)), features_PH)
        return flat_MH.view(embeddings_BTH.shape)

    def positions(self, causal_lm: Any, images: ImageTokens, keys: Keys) -> Tensor | None:
        """The positions of a sequence's tokens, [3, T], on the host; None where they are those of any tokens."""
        if not self.turns or min(keys, default=0) >= 0:
            return None
        whole = [*keys, *(images.rest_of(keys[-1]) if keys[-1] < 0 else [])]
        found = [images.image_of(key) for key in whole if key < 0]
        order = [media for media, number in found if number == 0]  # one that comes twice counts twice
        grid = torch.cat([self.reader.pixels(media).values["image_grid_thw"] for media in order])
        ids_1T = torch.tensor([[self.reader.token_id if key < 0 else key for key in whole]])
        kinds_1T = torch.tensor([[int(key < 0) for key in whole]], dtype=torch.int32)
        positions_31T, _ = causal_lm.model.get_rope_index(ids_1T, mm_token_type_ids=kinds_1T, image_grid_thw=grid)
        return positions_31T[:, 0, : len(keys)]

    @torch.no_grad()
    def _check(self, causal_lm: Any) -> None:
        """Compare with the model's own way from pixels to logits, on a small image between words."""
        training = [module for module in causal_lm.modules() if module.training]
        for module in training:
            module.training = False
        try:
            expected_TV, got_TV = self._both_ways(causal_lm)
        except Exception as error:  # whatever processors and models of any kind raise for what they do not take
            raise ModelError(f"{self.name} does not take images in a way that is known ({error})") from error
        finally:
            for module in training:
                module.training = True
            if getattr(getattr(causal_lm, "model", None), "rope_deltas", None) is not None:
                causal_lm.model.rope_deltas = None  # of this image, and it would be used for others
        tolerance = (1e-4 if causal_lm.dtype == torch.float32 else 5e-2) * float(expected_TV.abs().max())
        if expected_TV.isfinite().all() and not bool(((got_TV - expected_TV).abs() <= tolerance).all()):
            raise ModelError(
                f"{self.name} does more with images than to put their features in the place of embeddings (its tokens "
                "look at each other in both directions, or deeper layers get features too), which is not supported"
            )

    def _both_ways(self, causal_lm: Any) -> tuple[Tensor, Tensor]:
        """Logits by the model's own way, and by this one."""
        device = causal_lm.get_input_embeddings().weight.device
        given = sample_inputs(self.reader.processor)
        accepted = inspect.signature(causal_lm.forward).parameters
        inputs = {name: to_device(device, value) for name, value in given.items() if name in accepted}
        expected_TV = causal_lm(**inputs, use_cache=False).logits[0].float()
        ids = given["input_ids"][0].tolist()
        places = [place for place, token in enumerate(ids) if token == self.reader.token_id]
        images = ImageTokens(self.reader)
        media = Media(sample_image(), start=places[0], length=places[-1] + 1 - places[0])
        keys = images.keys(ids, [media])
        embeddings_1TH = self.embeddings(causal_lm, images, np.array([keys]), keep=False)
        positions_3T = self.positions(causal_lm, images, keys)
        where = torch.arange(len(keys))[None] if positions_3T is None else positions_3T[:, None]
        output = causal_lm(inputs_embeds=embeddings_1TH, position_ids=to_device(device, where), use_cache=False)
        return expected_TV, output.logits[0].float()


def sample_inputs(processor: Any) -> dict[str, Tensor]:
    """What the processor makes of a small image between words."""
    made = processor(text=[f"a{processor.image_token}b c"], images=[open_image(sample_image())], return_tensors="pt")
    return {name: made[name] for name in made}


def sample_image() -> bytes:
    """A small image that is not the same everywhere, as PNG."""
    import io

    import PIL.Image

    across, down = np.meshgrid(np.linspace(0, 255, 64), np.linspace(0, 255, 48))
    pixels = np.stack([across, down, 255 - across], axis=-1).astype(np.uint8)
    encoded = io.BytesIO()
    PIL.Image.fromarray(pixels).save(encoded, "PNG")
    return encoded.getvalue()
