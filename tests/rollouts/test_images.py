"""Images in prompts and conversations: the processor's tokens, in their places, turn after turn."""

from __future__ import annotations

from typing import Any

import pytest

from mrl.config import ModelConfig
from mrl.data.images import Picture, open_image, pictures_in
from mrl.errors import DataError, EnvError
from mrl.models import load_processor, load_tokenizer
from mrl.rollouts.chat import chat_format
from mrl.rollouts.conversation import Conversation
from mrl.rollouts.prompts import PromptEncoder
from mrl.rollouts.tools.content import as_content, joined
from mrl.rollouts.tools.functions import as_text
from mrl.types import Completion
from tests.vision_models import image, png

MODELS = ("llava_model", "qwen_vl_model")


def encoder_of(folder: str) -> PromptEncoder:
    config = ModelConfig(model=folder, device="cpu")
    return PromptEncoder(load_tokenizer(config), processor=load_processor(config))


def asks(*said: Any) -> dict[str, Any]:
    """A user's message: texts and images."""
    parts = [
        {"type": "text", "text": p} if isinstance(p, str) else {"type": "image", "image": Picture(p)} for p in said
    ]
    return {"role": "user", "content": parts}


@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_is_what_the_processor_makes_of_it(name: str, request: pytest.FixtureRequest) -> None:
    encoder = encoder_of(request.getfixturevalue(name))
    prompt = [{"role": "system", "content": "Look."}, asks("one ", image(), " two ", image("blue", (56, 84)), "?")]
    ids = encoder.encode(prompt)
    media = encoder.media(prompt, ids)
    processor = encoder.images.processor if encoder.images else None
    text = encoder.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
    expected = processor(text=[text], images=[open_image(one.data) for one in media])
    assert ids == expected["input_ids"][0]
    pads = [
        place
        for place, token in enumerate(ids)
        if token == encoder.tokenizer.convert_tokens_to_ids(processor.image_token)
    ]
    assert pads == [place for one in media for place in range(one.start, one.start + one.length)]


@pytest.mark.parametrize("name", MODELS)
def test_images_come_in_later_turns(name: str, request: pytest.FixtureRequest) -> None:
    """Each prompt continues the one before, and the processor would have made the same of the whole."""
    encoder = encoder_of(request.getfixturevalue(name))
    tokenizer = encoder.tokenizer
    talk = Conversation(chat_format(tokenizer, images=encoder.images), [asks(image(), "a")], images=encoder.images)
    before: tuple[int, ...] = ()
    for turn, new in enumerate(([image("blue")], ["no image"], [image(), image("green", (28, 56))], [])):
        prompt, media = talk.next_prompt(), talk.next_media()
        assert prompt[: len(before)] == before
        assert len(media) == (1, 2, 2, 4)[turn]
        said = [*tokenizer("hm", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        talk.add_completion(Completion(f"c{turn}", said, [-1.0] * len(said), "stop", 0))
        before = (*prompt, *said)
        if new:
            talk.add(asks(*new, "more"))
    (sample,) = talk.samples
    assert talk.extended == 3
    ids = [*sample.prompt_ids, *sample.completion_ids]
    assert tuple(ids) == before
    whole = encoder.encode([*talk.messages, {"role": "user", "content": ""}])
    assert whole[: len(ids)] == ids
    assert sample.media == tuple(encoder.media([*talk.messages, {"role": "user", "content": ""}], whole))
    assert [one.data for one in sample.media] == [picture.data for picture in pictures_in(talk.messages)]
    for one in sample.media[1:]:
        start = one.start - len(sample.prompt_ids)
        assert not any(sample.mask[start : start + one.length])


def test_texts_with_the_placeholder_are_refused(llava_model: str, tiny_model: str) -> None:
    encoder = encoder_of(llava_model)
    with pytest.raises(DataError, match="1 images, and the chat template wrote <image> 2 times"):
        encoder.encode([asks(image(), "what is <image>?")])
    with pytest.raises(DataError, match="an image of 900 x 4 pixels is more than 200 times as long as wide"):
        encoder_of(llava_model).encode([asks(image("red", (900, 4)))])
    with pytest.raises(DataError, match="the model takes no images"):
        PromptEncoder(load_tokenizer(ModelConfig(model=tiny_model, device="cpu"))).encode([asks(image())])


def test_templates_that_want_parts_get_parts(llava_model: str) -> None:
    encoder = encoder_of(llava_model)
    plain = encoder.encode([{"role": "user", "content": "hello"}, asks(image(), "b")])
    parts_only = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for part in m['content'] %}"
        "{% if part['type'] == 'image' %}<image>{% endif %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
        "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    encoder = encoder_of(llava_model)
    encoder.tokenizer.chat_template = parts_only
    assert encoder.images is not None
    encoder.images.processor.tokenizer.chat_template = parts_only
    assert encoder.encode([{"role": "user", "content": "hello"}, asks(image(), "b")]) == plain


def look() -> None: ...


def test_what_tools_say_may_have_images() -> None:
    def say(said: Any, *, images: bool = True) -> Any:
        return as_content(said, look, as_text, images=images)

    assert say("text") == "text"
    assert say([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]) == "ab"
    assert say(3) == "3"
    content = say([{"type": "text", "text": "a"}, {"type": "image", "image": png()}])
    assert [part["type"] for part in content] == ["text", "image"]
    assert content[1]["image"].data == png()
    (only,) = say(image())
    assert only["image"].size == (28, 28)
    assert joined("before ", content) == [{"type": "text", "text": "before "}, *content]
    assert joined([only], "after") == [only, {"type": "text", "text": "after"}]
    with pytest.raises(EnvError, match=r"look \(.*returned an image, and this model or engine takes none"):
        say(image(), images=False)
    with pytest.raises(DataError, match="an image from look"):
        say([{"type": "image", "image": 3}])
