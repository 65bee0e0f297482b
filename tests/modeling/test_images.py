"""Images among a model's tokens: the numbers and gradients of transformers' own forward pass, packed and padded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mrl.config import ModelConfig
from mrl.data.images import Picture, pictures_in
from mrl.errors import DataError, ModelError
from mrl.modeling.forward import Forward
from mrl.modeling.images import ImageModel, ImageReader, ImageTokens
from mrl.modeling.token_batch import make_token_batch
from mrl.models import load_model, load_processor, load_tokenizer
from mrl.rollouts.prompts import PromptEncoder
from mrl.types import Media, Sample, TrainBatch
from tests.vision_models import image, png

MODELS = ("llava_model", "qwen_vl_model")


def loaded(folder: str) -> tuple[Any, Any, PromptEncoder]:
    config = ModelConfig(model=folder, device="cpu")
    processor = load_processor(config)
    return load_model(config), processor, PromptEncoder(load_tokenizer(config), processor=processor)


def samples_of(encoder: PromptEncoder) -> list[Sample]:
    """Two of one prompt, one of the same ids with another image, one of two images of other sizes, one without."""
    shown: list[tuple[list[Any], str]] = [
        ([image("red")], "a"),
        ([image("red")], "a"),
        ([image("blue")], "a"),
        ([image("green", (56, 28)), image("red", (56, 56))], "longer?"),
        ([], "words"),
    ]
    made = []
    for number, (pictures, text) in enumerate(shown):
        parts = [{"type": "image", "image": Picture(picture)} for picture in pictures]
        prompt = [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
        ids = encoder.encode(prompt)
        completion = [65 + number, 70, 71 + number, 72][: 2 + number % 3]
        ones, zeros = [1] * len(completion), [0.0] * len(completion)
        made.append(Sample(ids, completion, zeros, ones, 0, media=encoder.media(prompt, ids)))
    return made


def expected_logprobs(model: Any, processor: Any, sample: Sample) -> Tensor:
    """By transformers alone, from pixels."""
    from mrl.data.images import open_image

    ids = torch.tensor([[*sample.prompt_ids, *sample.completion_ids]])
    given: dict[str, Tensor] = {}
    if sample.media:
        given = dict(processor.image_processor([open_image(m.data) for m in sample.media], return_tensors="pt"))
        if hasattr(model.model, "get_rope_index"):
            given["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    logits = model(input_ids=ids, **given, use_cache=False).logits[0]
    if hasattr(model.model, "rope_deltas"):
        model.model.rope_deltas = None
    start = len(sample.prompt_ids)
    logprobs = logits.log_softmax(dim=-1)[start - 1 : -1]
    return logprobs.gather(1, ids[0, start:, None])[:, 0]


@pytest.mark.parametrize("name", MODELS)
def test_logprobs_and_gradients_are_those_of_transformers(name: str, request: pytest.FixtureRequest) -> None:
    model, processor, encoder = loaded(request.getfixturevalue(name))
    samples = samples_of(encoder)
    assert len({sample.prompt_key for sample in samples}) == 4
    parameters = [p for p in model.parameters() if p.requires_grad]
    expected = torch.cat([expected_logprobs(model, processor, sample) for sample in samples])
    gradients = torch.autograd.grad(expected.sum(), parameters, allow_unused=True)
    named = zip(model.named_parameters(), gradients, strict=True)
    assert any("vis" in name for (name, _), gradient in named if gradient is not None)
    for packing in (True, False):
        forward = Forward(model, None, packing=packing, processor=processor)
        assert forward.packs == packing
        tokens = make_token_batch(TrainBatch(samples, [0.0] * len(samples), 1, 1), torch.device("cpu"))
        logprobs_BT, _ = forward.logprobs(model, tokens)
        got = logprobs_BT[tokens.mask_BT.bool()]
        assert torch.allclose(got, expected, atol=1e-5)
        mine = torch.autograd.grad(got.sum(), parameters, allow_unused=True)
        for one, other in zip(mine, gradients, strict=True):
            assert (one is None) == (other is None)
            assert one is None or torch.allclose(one, other, rtol=1e-3, atol=1e-4)


def test_images_have_keys_of_their_own(llava_model: str) -> None:
    _, processor, _ = loaded(llava_model)
    reader = ImageReader(processor)
    images, pad = ImageTokens(reader), reader.token_id
    ids = [5, pad, pad, pad, pad, 6, pad]
    red, blue = (Media(png(colour), start=1, length=4) for colour in ("red", "blue"))
    keys = images.keys(ids, [red])
    assert [key < 0 for key in keys] == [False, True, True, True, True, False, False], "the last one was sampled"
    assert images.keys(ids, [red]) == keys
    assert set(images.keys(ids, [blue])[1:5]).isdisjoint(keys)
    assert images.image_of(keys[3]) == (red, 2)
    assert images.rest_of(keys[3]) == [keys[4]]
    for wrong in (Media(png(), start=0, length=4), Media(png(), start=4, length=4)):
        with pytest.raises(DataError, match="made with another processor"):
            images.keys(ids, [wrong])
    images.keep_only(set())
    assert images.keys(ids, [red]) == keys, "numbers stay, for caches are known by them"


def test_a_model_that_does_more_with_images_is_refused(llava_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, processor, _ = loaded(llava_model)
    plain = model.forward

    def deeper(pixel_values: Any = None, **others: Any) -> Any:
        output = plain(pixel_values=pixel_values, **others)
        if pixel_values is not None:
            output.logits = output.logits + pixel_values.mean()
        return output

    monkeypatch.setattr(model, "forward", deeper)
    model.forward.__signature__ = __import__("inspect").signature(plain)
    with pytest.raises(ModelError, match="LlavaForConditionalGeneration does more with images"):
        ImageModel(model, ImageReader(processor))
    forward = Forward(model, None, packing=True, processor=processor)
    assert "does more with images" in forward.no_images


def test_embeddings_are_the_features(llava_model: str) -> None:
    model, processor, _ = loaded(llava_model)
    reader = ImageReader(processor)
    images, does = ImageTokens(reader), ImageModel(model, reader)
    media = Media(png(), start=1, length=4)
    keys = images.keys([5, *[reader.token_id] * 4, 6], [media])
    with torch.no_grad():
        found_1TH = does.embeddings(model, images, np.array([keys]), keep=True)
        features_NH = does.features(model, media)
    assert torch.equal(found_1TH[0, 1:5], features_NH)
    assert list(images.features) == [media.sha256]
    assert pictures_in([]) == []
