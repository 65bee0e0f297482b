"""Images in the decode loop: the numbers of transformers, and no keys and values of another image."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch

from mrl.config import ModelConfig
from mrl.data.images import Picture
from mrl.engines.transformers.engine import TransformersEngine
from mrl.models import load_model, load_processor, load_tokenizer
from mrl.rollouts.prompts import PromptEncoder
from mrl.types import Completion, GenerateRequest, SamplingParams, TokenSequence, WeightRef
from tests.modeling.test_images import expected_logprobs
from tests.vision_models import image

MODELS = ("llava_model", "qwen_vl_model")
LENGTH = 256


def engine_of(folder: str, **changes: Any) -> TransformersEngine:
    return TransformersEngine.create(ModelConfig(model=folder, device="cpu", max_model_len=LENGTH, **changes))


def request_of(folder: str, pictures: list[Any], text: str, name: str = "r", tokens: int = 10) -> GenerateRequest:
    config = ModelConfig(model=folder, device="cpu")
    encoder = PromptEncoder(load_tokenizer(config), processor=load_processor(config))
    parts = [{"type": "image", "image": Picture(picture)} for picture in pictures]
    prompt = [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
    ids = tuple(encoder.encode(prompt))
    media = encoder.media(prompt, ids)
    return GenerateRequest(name, ids, SamplingParams(max_tokens=tokens), seed=7, media=media)


def generate(engine: TransformersEngine, *requests: GenerateRequest) -> list[Completion]:
    found = asyncio.run(engine.generate(list(requests)))
    assert [completion.error for completion in found] == [None] * len(requests)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_the_numbers_are_those_of_transformers(name: str, request: pytest.FixtureRequest) -> None:
    from mrl.types import Sample

    folder = request.getfixturevalue(name)
    config = ModelConfig(model=folder, device="cpu")
    model, processor, engine = load_model(config), load_processor(config), engine_of(folder)
    cases = [([image("red")], "a"), ([image("blue")], "a"), ([image("green", (56, 28)), image()], "longer"), ([], "b")]
    requests = [request_of(folder, *case, name=f"r{n}") for n, case in enumerate(cases)]
    requests += [replace(one, id=f"{one.id}again", seed=8) for one in requests]
    completions = generate(engine, *requests)
    assert completions[0].prefilled
    assert completions[4].prefilled == 0, "equal prompts with equal images share their prefill"
    assert completions[0].logprobs != completions[1].logprobs
    placeholder = model.config.image_token_id
    for asked, completion in zip(requests, completions, strict=True):
        if placeholder in completion.token_ids:
            continue  # transformers takes it for an image
        ids, ones = completion.token_ids, [1] * len(completion.token_ids)
        sample = Sample(list(asked.prompt_ids), ids, completion.logprobs, ones, 0, media=asked.media)
        with torch.no_grad():
            expected = expected_logprobs(model, processor, sample)
        assert completion.logprobs == pytest.approx(expected.tolist(), abs=1e-5)
    sequences = [
        TokenSequence(r.prompt_ids, tuple(c.token_ids), 1.0, r.media)
        for r, c in zip(requests, completions, strict=True)
    ]
    scored = asyncio.run(engine.logprobs(sequences))
    for completion, logprobs in zip(completions, scored, strict=True):
        assert completion.logprobs == pytest.approx(logprobs, abs=1e-5)
    engine.close()


@pytest.mark.parametrize("name", MODELS)
def test_the_same_ids_with_another_image_share_nothing_of_it(name: str, request: pytest.FixtureRequest) -> None:
    """Neither within a batch, nor over a common prefix, nor from what a conversation left."""
    folder = request.getfixturevalue(name)
    engine = engine_of(folder)
    long = "x" * 80  # long enough for a prefix that all share
    red, blue = (request_of(folder, [image(colour)], long, name=colour) for colour in ("red", "blue"))
    assert red.prompt_ids == blue.prompt_ids
    alone = [generate(engine_of(folder), one)[0] for one in (red, blue)]
    assert alone[0].logprobs[0] != pytest.approx(alone[1].logprobs[0], abs=1e-4)
    for mine, theirs in zip(generate(engine, red, blue), alone, strict=True):
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
    start = red.media[0].start
    first = generate(engine, replace(red, session="one"))[0]
    assert first.logprobs == pytest.approx(alone[0].logprobs, abs=1e-5)
    for session in ("one", "two"):  # by the session, and by the blocks that another one left
        again = generate(engine, replace(blue, session=session))[0]
        assert again.logprobs == pytest.approx(alone[1].logprobs, abs=1e-5)
        assert again.prefilled is not None
        assert again.prefilled >= len(blue.prompt_ids) - start
        engine._prefixes.clear()
        generate(engine, replace(red, session="one"))
    same = generate(engine, replace(red, session="three"))[0]
    assert same.prefilled is not None
    assert same.prefilled < 10, "the same image is the same beginning"
    assert same.logprobs == pytest.approx(alone[0].logprobs, abs=1e-5)
    engine.close()


def test_a_conversation_goes_on_behind_its_images(qwen_vl_model: str) -> None:
    """Positions after an image are other than the tokens' numbers, also where only the rest is computed."""
    engine = engine_of(qwen_vl_model)
    first = replace(request_of(qwen_vl_model, [image("red", (56, 56))], "x" * 40), session="s")
    said = generate(engine, first)[0].token_ids
    longer = replace(first, prompt_ids=(*first.prompt_ids, *said, 65, 66, 67), seed=9)
    kept, whole = generate(engine, longer)[0], generate(engine_of(qwen_vl_model), replace(longer, session=None))[0]
    assert kept.prefilled is not None
    assert kept.prefilled < 10
    assert kept.logprobs == pytest.approx(whole.logprobs, abs=1e-5)


def test_new_weights_see_images_anew(qwen_vl_model: str) -> None:
    engine, asked = engine_of(qwen_vl_model), request_of(qwen_vl_model, [image()], "a")
    before = generate(engine, asked)[0]
    model = load_model(ModelConfig(model=qwen_vl_model, device="cpu"))
    with torch.no_grad():
        for parameter in model.model.visual.parameters():
            parameter.mul_(1.5)
    engine.load_weights(WeightRef(1, module=model))
    after = generate(engine, asked)[0]
    fresh = TransformersEngine(
        model, None, max_model_len=LENGTH, processor=load_processor(ModelConfig(model=qwen_vl_model, device="cpu"))
    )
    assert after.logprobs == generate(fresh, asked)[0].logprobs != before.logprobs


def test_what_cannot_be_served_says_why(llava_model: str, tiny_model: str) -> None:
    asked = request_of(llava_model, [image()], "a")
    moved = replace(asked, id="moved", media=(replace(asked.media[0], start=0),))
    broken = replace(asked, id="broken", media=(replace(asked.media[0], data=b"x", sha256=""),))
    engine = engine_of(llava_model)
    good, wrong, bad = asyncio.run(engine.generate([asked, moved, broken]))
    assert good.error is None
    assert "request 'moved'" in str(wrong.error)
    assert "made with another processor" in str(wrong.error)
    assert "is no image that can be read" in str(bad.error)
    (refused,) = asyncio.run(engine_of(tiny_model).generate([replace(asked, prompt_ids=(1, 2))]))
    assert refused.error == "request 'r' has 1 image(s), and the model takes none"
