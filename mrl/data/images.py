"""Images in datasets and messages: read when they are needed, known by the hash of their file.

column `image` / `images`, {"type": "image", "image": …}  ─▶  Picture  ─▶  Media, in a request
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from mrl.errors import DataError
from mrl.types import Media, Message, Prompt

COLUMNS = ("image", "images")
"""A task's image, or a list of them, as TRL names them."""
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
"""What a text in these columns has to end with to be the path of an image."""
_KEYS = ("image", "url", "path", "base64", "image_url")
"""Where a message's part may have its image."""
_TURNED = (5, 6, 7, 8)
"""EXIF orientations that exchange width and height."""
_PRINTED = ("CMYK", "YCbCr")
"""Modes of JPEG files that PNG does not have."""


class Picture:
    """An image from a file, from encoded bytes, or from one of PIL's. `where`: what errors call it."""

    def __init__(self, source: Any, where: str = "image") -> None:
        """source: a path, bytes, a dict of `bytes` or `path` as `datasets` has it, a data URL, or an image of PIL's.

        Raises DataError for anything else; whether it can be read shows later.
        """
        self.where = where
        self._path: Path | None = None
        self._data: bytes | None = None
        self._image: Any = None
        self._media: Media | None = None
        self._record: dict[str, Any] | None = None
        if isinstance(source, dict):
            source = source.get("bytes") if source.get("bytes") is not None else source.get("path")
        if isinstance(source, bytes | bytearray):
            self._data = bytes(source)
        elif isinstance(source, Path):
            self._path = source
        elif isinstance(source, str):
            self._take_text(source)
        elif _is_pil(source):
            self._image = source
        else:
            raise DataError(
                f"{where} is of type {type(source).__name__}: an image is a path, bytes, a data URL, or one of PIL's"
            )

    @property
    def data(self) -> bytes:
        """The encoded file. Raises DataError."""
        if self._media is not None:
            return self._media.data
        if self._data is None and self._image is not None:
            try:
                self._data, self._image = _as_png(self._image), None
            except Exception as error:  # a mode that PNG does not have, or a damaged file that PIL reads only now
                raise DataError(f"{self.where} cannot be written as PNG: {error}") from error
        if self._data is not None:
            return self._data
        assert self._path is not None
        try:
            return self._path.read_bytes()
        except (OSError, ValueError) as error:  # ValueError: no path at all
            reason = error.strerror if isinstance(error, OSError) else error
            raise DataError(f"{self.where}: {self._path} cannot be read ({reason})") from None

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels, from the file's header. Raises DataError."""
        import PIL.Image

        if self._image is not None:
            return _size(self._image)
        source: Any = self._path if self._path is not None else io.BytesIO(self.data)
        try:
            with PIL.Image.open(source) as image:
                return _size(image)
        except FileNotFoundError:
            raise DataError(f"{self.where}: there is no file {self._path}") from None
        except Exception as error:  # whatever the reader of a damaged file raises
            raise DataError(f"{self.where}{self._named()} is no image that can be read ({_said(error)})") from error

    def check(self) -> None:
        """Look at the file's header. Raises DataError."""
        if not all(self.size):
            raise DataError(f"{self.where}{self._named()} has no pixels")

    def media(self) -> Media:
        """For a request; its pixels were read once by then. Raises DataError."""
        if self._media is None:
            data = self.data
            _opened(data, f"{self.where}{self._named()}")
            found = Media(data)
            if self._path is not None:
                return found  # kept by nobody but who uses it: datasets are larger than memory
            self._media, self._data = found, None
        return self._media

    def open(self) -> Any:
        """The image as PIL has it, in RGB, turned as it was taken. Raises DataError."""
        return _opened(self.data, f"{self.where}{self._named()}")

    @property
    def identity(self) -> str:
        """Tells it from others without reading a file."""
        return f"path:{self._path}" if self._path is not None else hashlib.sha256(self.data).hexdigest()

    def record(self) -> dict[str, Any]:
        """What a run's record has of it, in the place of its bytes."""
        if self._record is None:
            try:
                data = self.data
                self._record = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
            except DataError as error:
                self._record = {"error": str(error)}
        return self._record

    def __repr__(self) -> str:
        return f"Picture({self.identity})"

    def _take_text(self, text: str) -> None:
        if text.startswith("data:"):
            head, _, body = text.partition(",")
            try:
                self._data = base64.b64decode(body, validate=True) if head.endswith(";base64") else None
            except (binascii.Error, ValueError):
                self._data = None
            if self._data is None:
                raise DataError(f"{self.where} is a data URL that is not base64")
        elif text.startswith(("http://", "https://")):
            raise DataError(f"{self.where} is a web address: download the image, nothing is fetched during a run")
        else:
            try:
                self._path = Path(text.removeprefix("file://")).expanduser()
            except RuntimeError as error:  # ~ and a name that is no user's
                raise DataError(f"{self.where}: {text!r} is no path ({error})") from None

    def _named(self) -> str:
        return f" ({self._path})" if self._path is not None else ""


def open_image(data: bytes) -> Any:
    """An encoded image as PIL has it, in RGB, turned as it was taken. Raises DataError."""
    return _opened(data, "an image")


def looks_like_image(value: Any) -> bool:
    """Whether a value of a column `image` is one: another column may be called so, too."""
    if isinstance(value, str):
        return value.startswith("data:image/") or value.lower().endswith(SUFFIXES)
    is_file = isinstance(value, dict) and bool(value) and value.keys() <= {"bytes", "path"}
    return isinstance(value, Picture | bytes | bytearray | Path) or is_file or _is_pil(value)


def is_image(value: Any) -> bool:
    """Whether it is an image by itself, and not something that may stand for one."""
    return isinstance(value, Picture) or _is_pil(value)


def pictures_of_row(row: dict[str, Any], where: str) -> tuple[dict[str, Any], list[Picture]]:
    """The row with the images of its column `image` or `images` as `Picture`s, and these. Raises DataError."""
    found: dict[str, list[Picture]] = {}
    for name in COLUMNS:
        value = row.get(name)
        one = looks_like_image(value)
        if one or (isinstance(value, list | tuple) and value and all(map(looks_like_image, value))):
            named = f"{where}, column {name!r}"
            values: Sequence[Any] = [value] if one else cast(Sequence[Any], value)
            found[name] = [item if isinstance(item, Picture) else Picture(item, named) for item in values]
            for picture in found[name]:
                picture.where = named
            row = {**row, name: found[name][0] if one else found[name]}
    if len(found) > 1:
        raise DataError(f"{where}: has images in both columns, 'image' and 'images'; keep one")
    return row, next(iter(found.values()), [])


def with_pictures(prompt: Prompt, pictures: list[Picture], where: str) -> Prompt:
    """The prompt with its images in place, as TRL places them: `pictures` at its own `{"type": "image"}` parts in turn,
    or without such parts before the first user message's text. Raises DataError where their numbers differ."""
    if isinstance(prompt, str):
        if not pictures:
            return prompt
        prompt = [{"role": "user", "content": prompt}]
    waiting = iter(pictures)
    messages = [_filled(message, waiting, f"{where}, message {n}") for n, message in enumerate(prompt)]
    rest = list(waiting)
    if not rest:
        return messages
    first = next((n for n, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None or not isinstance(messages[first].get("content"), str) or len(rest) < len(pictures):
        raise DataError(
            f"{where}: the row has {len(pictures)} images, and its messages have {len(pictures) - len(rest)} parts "
            f'{{"type": "image"}} to put them; give one for each, or none'
        )
    parts = [*({"type": "image", "image": picture} for picture in rest), text_part(messages[first]["content"])]
    messages[first] = {**messages[first], "content": parts}
    return messages


def as_message(message: Message, where: str) -> Message:
    """A message with its images as `Picture`s. Raises DataError for a part without one, or with one that will not
    do."""
    return _filled(message, iter(()), where)


def pictures_in(messages: Sequence[Message]) -> list[Picture]:
    """In their order."""
    return list(_pictures(messages))


def opened(value: Any) -> Any:
    """A value as reward functions get it: `Picture`s in it as images of PIL's."""
    if isinstance(value, Picture):
        return value.open()
    if not _holds_picture(value):
        return value  # itself
    if isinstance(value, dict):
        return {name: opened(item) for name, item in value.items()}
    return [opened(item) for item in value]


def text_part(text: str) -> dict[str, Any]:
    """A text as a message's part."""
    return {"type": "text", "text": text}


def _filled(message: Message, waiting: Iterator[Picture], where: str) -> Message:
    content = message.get("content")
    if not isinstance(content, list) or not any(_is_image_part(part) for part in content):
        return message
    parts = []
    for part in content:
        if _is_image_part(part):
            value = next((part[key] for key in _KEYS if part.get(key) is not None), None)
            if isinstance(value, dict) and "url" in value:  # as OpenAI's API has it
                value = value["url"]
            if isinstance(value, str) and "base64" in part:
                value = f"data:image/png;base64,{value}"
            picture = next(waiting, None) if value is None else value
            if picture is None:
                raise DataError(f"{where}: a part of type 'image' has no image, and the row has none left for it")
            part = {"type": "image", "image": picture if isinstance(picture, Picture) else Picture(picture, where)}
        parts.append(part)
    return {**message, "content": parts}


def _holds_picture(value: Any) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(isinstance(item, Picture) or _holds_picture(item) for item in inner)


def _is_image_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in ("image", "image_url")


def _pictures(messages: Sequence[Message]) -> Iterator[Picture]:
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and isinstance(part.get("image"), Picture):
                yield part["image"]


def _opened(data: bytes, where: str) -> Any:
    import PIL.Image
    import PIL.ImageOps

    try:
        with PIL.Image.open(io.BytesIO(data)) as image:
            if image.format == "EPS":  # a program, which PIL would have Ghostscript run
                raise ValueError("EPS is not taken")
            return PIL.ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:  # whatever the reader of a damaged file raises
        raise DataError(f"{where} is no image that can be read ({_said(error)})") from error


def _size(image: Any) -> tuple[int, int]:
    """Height and width of an image of PIL's, turned as it was taken."""
    turned = image.getexif().get(0x0112) in _TURNED
    return (image.width, image.height) if turned else (image.height, image.width)


def _as_png(image: Any) -> bytes:
    """An image of PIL's, turned as it was taken: PNG files do not say how."""
    import PIL.ImageOps

    encoded = io.BytesIO()
    image = PIL.ImageOps.exif_transpose(image)
    (image.convert("RGB") if image.mode in _PRINTED else image).save(encoded, "PNG")
    return encoded.getvalue()


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"


def _is_pil(value: Any) -> bool:
    pil = sys.modules.get("PIL.Image")  # not imported: then it cannot be one
    return pil is not None and isinstance(value, pil.Image)
