"""How a chat template writes calls of tools, found out by letting it write some, and read back from completions.

Two ways are known, with anything around them:

    … {"name": "add", "arguments": {"a": 1}} …        one JSON object, by whatever keys (Hermes, Llama, Mistral …)
    … add … {"a": 1} …                                the name, then its arguments as JSON (DeepSeek, newer Mistral …)
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from mrl.errors import DataError
from mrl.rollouts.chat.base import ToolCall
from mrl.types import Message

_NAMES, _KEY, _VALUES = ("zqfirst", "zqsecond"), "zqkey", ("zqone", "zqtwo")
_USER: Message = {"role": "user", "content": "zqask"}
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "",
            "parameters": {"type": "object", "properties": {_KEY: {"type": "string"}}, "required": [_KEY]},
        },
    }
    for name in _NAMES
]
_DECODER = json.JSONDecoder()

Parsed = tuple[str, list[ToolCall], list[str]]
"""The text without the calls, the calls, and those that cannot be read."""


class CallSyntax(Protocol):
    """A way of writing calls."""

    several: bool
    """Whether a turn may have several."""

    def parse(self, text: str) -> Parsed:
        """What a completion calls. A call that cannot be read stays in the text."""
        ...


def call_id(number: int) -> str:
    """Of the call so-and-so-many of a turn: nine letters and digits, as Mistral's templates demand."""
    return f"call{number:05d}"


def derive_call_syntax(text_of: Callable[..., str], turn_end: str) -> CallSyntax | None:
    """The syntax of a template; None where it writes no calls, or in a way that is not known.

    text_of: renders messages (with tools, and `prompt=True` for the beginning of the next turn).
    """
    one = _written(text_of, 1, turn_end)
    if one is None or _NAMES[0] not in one or _VALUES[0] not in one:
        return None
    two = _written(text_of, 2, turn_end)
    return _derive_objects(one, two) or _derive_named(one, two)


@dataclass
class ObjectCalls:
    """Calls as JSON objects. opening, closing: around each, or in `listed` around a list of them; may be empty."""

    opening: str
    closing: str
    name: str
    arguments: str
    """Keys of the object."""
    listed: bool
    several: bool
    """Whether the template writes several calls in one turn; if not, a turn of several cannot be read."""

    def parse(self, text: str) -> Parsed:
        """What a completion calls."""
        kept, calls, malformed = self._marked(text) if self.opening else self._bare(text)
        return (text, [], [text.strip()]) if len(calls) > 1 and not self.several else (kept, calls, malformed)

    def _marked(self, text: str) -> Parsed:
        kept, at = "", 0
        calls: list[ToolCall] = []
        malformed: list[str] = []
        while (start := text.find(self.opening, at)) >= 0:
            kept += text[at:start]
            found, end = _json_at(text, start + len(self.opening))
            objects = found if self.listed and isinstance(found, list) else [found]
            read = [self._call(value, len(calls) + n) for n, value in enumerate(objects)]
            if end < 0 or None in read:
                end = _end_of(text, start + len(self.opening), self.closing)
                malformed.append(text[start:end])
                kept += text[start:end]
            else:
                calls += [call for call in read if call is not None]
                end = _skip(text, end, self.closing)
            at = end
        kept += text[at:]
        return (kept.rstrip() if calls else kept), calls, malformed

    def _bare(self, text: str) -> Parsed:
        """Nothing marks a call: the whole text is one, or several with semicolons or white space between."""
        calls: list[ToolCall] = []
        at = 0
        rest = text.strip()
        while at < len(rest):
            found, end = _json_at(rest, at)
            call = self._call(found, len(calls)) if end >= 0 else None
            if call is None:
                looks_like_one = rest.startswith("{") and f'"{self.name}"' in rest
                return text, [], [rest] if looks_like_one else []
            calls.append(call)
            at = end + len(rest[end:]) - len(rest[end:].lstrip("; \n\t"))
        return ("" if calls else text), calls, []

    def _call(self, value: Any, number: int) -> ToolCall | None:
        name = value.get(self.name) if isinstance(value, dict) else None
        if not isinstance(name, str) or not name or not _is_text(name):
            return None
        arguments = as_arguments(value.get(self.arguments, {}))
        return None if arguments is None else ToolCall(call_id(number), name, arguments)


@dataclass
class NamedCalls:
    """Calls as a name and its arguments. section: what stands before the first of several; all may be empty but
    `opening` and `middle`."""

    section: str
    opening: str
    middle: str
    closing: str
    section_end: str
    several: bool

    def parse(self, text: str) -> Parsed:
        """What a completion calls."""
        kept, calls, malformed = self._marked(text)
        return (text, [], [text.strip()]) if len(calls) > 1 and not self.several else (kept, calls, malformed)

    def _marked(self, text: str) -> Parsed:
        kept, at = "", 0
        calls: list[ToolCall] = []
        malformed: list[str] = []
        while (start := text.find(self.opening, at)) >= 0:
            before = text[at:start].rstrip()
            kept += before.removesuffix(self.section) if self.section and before.endswith(self.section) else before
            name_at = start + len(self.opening)
            middle = text.find(self.middle, name_at)
            name = text[name_at:middle].strip() if middle >= 0 else ""
            found, end = _json_at(text, middle + len(self.middle)) if name else (None, -1)
            arguments = as_arguments(found) if end >= 0 else None
            if arguments is None or "\n" in name:
                end = _end_of(text, name_at, self.closing)
                malformed.append(text[start:end])
                kept += text[start:end]
            else:
                calls.append(ToolCall(call_id(len(calls)), name, arguments))
                end = _skip(text, end, self.closing)
                end = _skip(text, end, self.section_end)
            at = end
        rest = text[at:]
        kept += rest
        return (kept.rstrip() if calls else kept), calls, malformed


def as_arguments(value: Any) -> dict[str, Any] | None:
    """A call's arguments; some models write them as JSON within a string. None for what are no arguments."""
    if isinstance(value, str):
        value, end = _json_at(value, 0)
        value = value if end >= 0 else None
    try:
        return value if isinstance(value, dict) and _is_text(json.dumps(value, ensure_ascii=False)) else None
    except RecursionError:
        return None


def _written(text_of: Callable[..., str], calls: int, turn_end: str) -> str | None:
    """What the template writes for an assistant that makes so many calls; None if it refuses to."""
    made = [
        {"type": "function", "id": call_id(n), "function": {"name": _NAMES[n], "arguments": {_KEY: _VALUES[n]}}}
        for n in range(calls)
    ]
    try:
        before = text_of([_USER], _TOOLS, prompt=True)
        text = text_of([_USER, {"role": "assistant", "content": "", "tool_calls": made}], _TOOLS)
    except DataError:
        return None
    # What the two share may end within a token in angle brackets.
    begun = re.sub(r"[<\[][^<>\[\]]*$", "", _common(before, text))
    return text[len(begun) :].removesuffix(turn_end)


def _derive_objects(one: str, two: str | None) -> ObjectCalls | None:
    for start in (match.start() for match in re.finditer(r"\{", one[: one.index(_NAMES[0])])):
        found, end = _json_at(one, start)
        if end < 0 or not isinstance(found, dict):
            continue
        names = [key for key, value in found.items() if value == _NAMES[0]]
        arguments = [key for key, value in found.items() if as_arguments(value) == {_KEY: _VALUES[0]}]
        if not names or not arguments:
            continue
        before, after = one[:start].strip(), one[end:].strip()
        if before.endswith("["):
            opening, closing = before.removesuffix("[").strip(), after.removeprefix("]").strip()
            return ObjectCalls(opening, closing, names[0], arguments[0], listed=True, several=two is not None)
        if two is not None and before and one[start:end] in two:
            # What the first call has before it and the second has not is no part of a call.
            between = two[_json_at(two, two.index(one[start:end]))[1] : two.index(_NAMES[1])]
            before = _common(before[::-1], between[: between.rindex("{")].strip()[::-1])[::-1].strip()
        return ObjectCalls(before, after, names[0], arguments[0], listed=False, several=two is not None)
    return None


def _derive_named(one: str, two: str | None) -> NamedCalls | None:
    name_at = one.index(_NAMES[0])
    after_name = one[name_at + len(_NAMES[0]) :]
    start = after_name.find("{")
    found, end = _json_at(after_name, start) if start > 0 else (None, -1)
    if end < 0 or as_arguments(found) != {_KEY: _VALUES[0]}:
        return None
    before, middle, after = one[:name_at].strip(), after_name[:start].strip(), after_name[end:].strip()
    if not before or not middle:
        return None
    if two is None or _NAMES[1] not in two:
        return NamedCalls("", before, middle, after, "", several=False)
    between = two[two.index(_VALUES[0]) : two.index(_NAMES[1])].partition("}")[2].strip()
    opening = _common(before[::-1], between[::-1])[::-1] or before
    closing = _common(after, between.removesuffix(opening))
    section = before.removesuffix(opening).strip()
    section_end = after.removeprefix(closing).strip()
    return NamedCalls(section, opening, middle, closing.strip(), section_end, several=True)


def _common(one: str, other: str) -> str:
    """What both begin with."""
    same = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:same]


def _json_at(text: str, at: int) -> tuple[Any, int]:
    """A JSON value that begins there, after white space, and where it ends; -1 if there is none."""
    at += len(text[at:]) - len(text[at:].lstrip())
    try:
        value, end = _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, -1
    return value, end


def _is_text(text: str) -> bool:
    """False with half of a surrogate pair, which JSON can hold and no tokenizer takes."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _end_of(text: str, at: int, closing: str) -> int:
    """Where something that cannot be read ends: after what closes it, else at the end."""
    end = text.find(closing, at) if closing else -1
    return len(text) if end < 0 else end + len(closing)


def _skip(text: str, at: int, what: str) -> int:
    """After `what`, if it follows."""
    rest = text[at:].lstrip()
    return len(text) - len(rest) + len(what) if what and rest.startswith(what) else at
