"""Text of models and environments as HTML that shows what is there and does nothing.

It is escaped, control characters and marks that turn the direction of writing are shown by their names, and what is
long is cut, with a way to all of it.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

MOST = 12_000
"""Characters of a text that are shown at first."""
LINE = 2_000
"""Characters of a line that are shown at first."""

_NAMES = {
    **{chr(code): chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"},
    "\x7f": "␡",
    "\u00ad": "SHY",
    "\u061c": "ALM",
    "\u200b": "ZWSP",
    "\u200c": "ZWNJ",
    "\u200e": "LRM",
    "\u200f": "RLM",
    "\u2028": "LSEP",
    "\u2029": "PSEP",
    "\u202a": "LRE",
    "\u202b": "RLE",
    "\u202c": "PDF",
    "\u202d": "LRO",
    "\u202e": "RLO",
    "\u2060": "WJ",
    "\u2066": "LRI",
    "\u2067": "RLI",
    "\u2068": "FSI",
    "\u2069": "PDI",
    "\ufeff": "BOM",
}
_FENCE = re.compile(r"^[ ]{0,3}```([^`\n]{0,40})\n(.*?)(?:^[ ]{0,3}```[ \t]*$\n?|\Z)", re.MULTILINE | re.DOTALL)
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200c\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\ufdd0-\ufdef\U000e0000-\U000e007f]"
)


def shown(text: str) -> Markup:
    """All of it, harmless: escaped, with invisible and dangerous characters named."""
    return Markup(_INVISIBLE.sub(_named, str(escape(text))))


def plain(text: str) -> str:
    """The same for attributes, titles and files: without elements of its own."""
    return _INVISIBLE.sub(lambda found: _name(found[0]), text)


def one_line(text: Any, most: int = 160) -> Markup:
    """The beginning of a text, for a cell of a table."""
    if text is None:
        return Markup("")
    line = " ".join(str(text)[: 4 * most].split(" ")).replace("\n", " ⏎ ")
    return shown(line[:most] + "…" if len(line) > most or len(str(text)) > 4 * most else line)


@dataclass(frozen=True)
class Cut:
    """A text as it is shown at first."""

    html: Markup
    hidden: int
    """Characters that are left out."""


def cut(text: str, most: int = MOST, line: int = LINE) -> Cut:
    """The first `most` characters, of each line the first `line`."""
    left, parts, kept = most, [], 0
    for part in text[: most + 1].split("\n"):
        taken = part[: min(line, left)]
        kept += len(taken) + 1
        left -= len(taken) + 1
        parts.append(taken if len(taken) == len(part) else f"{taken} …")
        if left <= 0:
            break
    hidden = max(len(text) - (kept - 1), 0)
    return Cut(shown("\n".join(parts)), hidden)


def blocks(text: str, most: int = MOST) -> list[tuple[str, str, Cut]]:
    """Prose and fenced code, in order, as (`prose` or `code`, the fence's language, the text), cut together."""
    found: list[tuple[str, str, Cut]] = []
    pieces = _FENCE.split(text[: most + 1]) if len(text) <= most else [text]
    # Split at fences: prose, then (language, code, prose) again and again.
    for at in range(0, len(pieces), 3):
        if at and (pieces[at - 1] or pieces[at - 2]):
            found.append(("code", pieces[at - 2].strip(), cut(pieces[at - 1], most)))
        if pieces[at].strip() or len(pieces) == 1:
            found.append(("prose", "", cut(pieces[at].strip("\n"), most)))
    return found


def said(value: Any) -> str:
    """What a prompt or a completion says, whether it is a text or messages."""
    if not isinstance(value, list):
        return content_text(value)
    parts = []
    for one in value:
        if not isinstance(one, dict):
            parts.append(str(one))
            continue
        text = content_text(one.get("content"))
        calls = f"\n{one['tool_calls']}" if one.get("tool_calls") else ""
        parts.append(f"{one.get('role', 'message')}: {text}{calls}" if len(value) > 1 else f"{text}{calls}")
    return "\n".join(parts)


def content_text(content: Any) -> str:
    """A message's content as text: of images their hash and size."""
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if isinstance(content, list) and all(isinstance(part, dict) and "type" in part for part in content):
        return "\n".join(_part_text(part) for part in content)
    return str(content)


def _part_text(part: dict[str, Any]) -> str:
    if part["type"] == "text":
        return str(part.get("text", ""))
    image = part.get("image")
    if isinstance(image, dict) and "sha256" in image:
        return f"[image {str(image['sha256'])[:12]}, {image.get('bytes', '?')} bytes]"
    return str(part)


def _named(found: re.Match[str]) -> str:
    character = found[0]
    return f'<span class="ctl" title="U+{ord(character):04X} {_title(character)}">{_name(character)}</span>'


def _name(character: str) -> str:
    if character in _NAMES:
        return _NAMES[character]
    code = ord(character)
    if 0xD800 <= code <= 0xDFFF:
        return f"\\u{code:04x}"
    return f"\\x{code:02x}" if code < 0x100 else f"U+{code:04X}"


def _title(character: str) -> str:
    return unicodedata.name(character, "half of a pair" if 0xD800 <= ord(character) <= 0xDFFF else "control character")
