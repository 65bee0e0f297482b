"""Images in prompts: a template's placeholder becomes the tokens that the model's processor writes for an image.

How many those are depends on the image's size alone, so no pixels are read here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mrl.data.images import Picture, pictures_in, text_part
from mrl.errors import DataError
from mrl.types import Media, Message

if TYPE_CHECKING:
    from transformers import ProcessorMixin


MOST_LONG = 200
"""An image may be so many times as long as wide, as with Qwen2-VL: processors that scale the shorter side to a fixed
number of pixels make gigabytes of a single row of them."""


class ImageWriter:
    """Writes images for one processor (`mrl.models.load_processor`)."""

    def __init__(self, processor: ProcessorMixin) -> None:
        self.processor: Any = processor
        self.token: str = processor.image_token  # type: ignore[attr-defined]  # of those that take images
        self._written: dict[tuple[int, int], str] = {}
        """By height and width."""
        self._ids: dict[str, list[int]] = {}
        self._parts: bool | None = None

    def shown(self, messages: Sequence[Message]) -> list[Message]:
        """Messages as the chat template takes them: texts as parts, where it writes nothing of plain ones."""
        if self._parts is None:
            self._parts = self._wants_parts()
        if not self._parts:
            return list(messages)
        return [
            {**message, "content": [text_part(message["content"])]}
            if isinstance(message.get("content"), str)
            else message
            for message in messages
        ]

    def expand(self, text: str, messages: Sequence[Message]) -> str:
        """What the template wrote, with the images of `messages` in their places. Raises DataError."""
        pictures = pictures_in(messages)
        pieces = text.split(self.token)
        if len(pieces) - 1 != len(pictures):
            raise DataError(
                f"{len(pictures)} images, and the chat template wrote {self.token} {len(pieces) - 1} times: it writes "
                "no images where these are, or a message's text has that token"
            )
        written = [self._write(picture) for picture in pictures]
        return pieces[0] + "".join(image + piece for image, piece in zip(written, pieces[1:], strict=True))

    def media(self, ids: Sequence[int], messages: Sequence[Message], start: int = 0) -> list[Media]:
        """The images of `messages`, and where in `ids` their tokens are, which are from `start` on. Raises DataError
        for one that cannot be read."""
        found: list[Media] = []
        for picture in pictures_in(messages):
            own = self._ids_of(self._write(picture))
            places = range(start, len(ids) - len(own) + 1)
            at = next((at for at in places if list(ids[at : at + len(own)]) == own), None)
            if at is None:
                raise DataError(f"{picture.where}: its tokens are not in the prompt as the processor writes them")
            found.append(replace(picture.media(), start=at, length=len(own)))
            start = at + len(own)
        return found

    def _write(self, picture: Picture) -> str:
        size = picture.size
        if max(size) > MOST_LONG * min(size):
            raise DataError(
                f"{picture.where}: an image of {size[1]} x {size[0]} pixels is more than {MOST_LONG} times as long as "
                "wide"
            )
        if size not in self._written:
            import PIL.Image

            try:
                made = self.processor.image_processor([PIL.Image.new("RGB", size[::-1])], return_tensors="pt")
                self._written[size] = str(self.processor.replace_image_token(made, 0))
            except (ValueError, RuntimeError) as error:
                raise DataError(
                    f"{picture.where}: the model's processor does not take an image of {size[1]} x {size[0]} pixels "
                    f"({error})"
                ) from error
        return self._written[size]

    def _ids_of(self, text: str) -> list[int]:
        if text not in self._ids:
            self._ids[text] = list(self.processor.tokenizer(text, add_special_tokens=False)["input_ids"])
        return self._ids[text]

    def _wants_parts(self) -> bool:
        from jinja2 import TemplateError

        try:
            message = {"role": "user", "content": "zqask"}
            return "zqask" not in self.processor.tokenizer.apply_chat_template([message], tokenize=False)
        except (TemplateError, TypeError, ValueError):
            return True
