"""What tools and environments say, as a message's content: text, or parts with images where there are any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mrl.data.images import Picture, as_message, is_image, text_part
from mrl.errors import EnvError
from mrl.rollouts.tools.functions import described

Content = str | list[dict[str, Any]]


def as_content(said: Any, who: Any, as_text: Callable[[Any, Any], str], *, images: bool) -> Content:
    """A message's content.

    said: what it returned: text, a list of parts (TRL's way: `{"type": "text", "text": …}`, `{"type": "image", "image":
    …}`), an image of PIL's, or anything else, of which the text is taken. who: the function. as_text: for what has no
    images. images: whether the model takes any. Raises EnvError where it does not, DataError for an image that will not
    do, and what `as_text` raises.
    """
    parts = [{"type": "image", "image": said}] if is_image(said) else said
    is_parts = isinstance(parts, list) and all(isinstance(part, dict) and "type" in part for part in parts)
    if not is_parts or not any(part["type"] in ("image", "image_url") for part in parts):
        return as_text(said, who)
    if not images:
        raise EnvError(f"{described(who)} returned an image, and this model or engine takes none")
    where = f"an image from {described(who)}"
    content = as_message({"role": "tool", "content": parts}, where)["content"]
    found: list[dict[str, Any]] = []
    for part in content:
        if isinstance(part.get("image"), Picture):
            found.append(part)
        else:
            found.append(text_part(as_text([part], who)))  # refuses parts of other types
    return found


def joined(content: Any, more: Content) -> Content:
    """A message's content with more behind it; None = it had none."""
    if isinstance(content, str) and isinstance(more, str):
        return content + more
    return [*_parts(content), *_parts(more)]


def _parts(content: Any) -> list[dict[str, Any]]:
    return content if isinstance(content, list) else [text_part(content)] if content else []
