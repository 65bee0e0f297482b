"""Finding a text in the messages of rollouts: a search that says how far it came, instead of making anybody wait."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from mrl.store.filters import Filter, Order
from mrl.store.read import Cursor, RunReader

CHUNK = 256
"""Rollouts whose texts are read at a time."""


@dataclass
class Found:
    """What a search found so far."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    """Summaries."""
    searched: int = 0
    """Rollouts that were looked at, of those that the filter lets through."""
    next: Cursor | None = None
    """Give it as `after` to search on; None = everything was searched."""


@dataclass
class Counted:
    """How many matches were counted so far."""

    matches: int = 0
    searched: int = 0
    """Rollouts that were looked at, of those that the filter lets through."""
    next: Cursor | None = None
    """Give it as `after` to count on; None = everything was searched."""


def search(
    reader: RunReader,
    wanted: str,
    where: Filter | None = None,
    *,
    limit: int = 50,
    after: tuple[int, int] | None = None,
    newest_first: bool = False,
    order: Order = "step",
    seconds: float = 0.5,
    clock: Callable[[], float] = time.monotonic,
) -> Found:
    """Rollouts with `wanted` in a message, upper and lower case alike, in the order of `RunReader.page`.

    Ends after `limit` of them, or after so many seconds (at least a chunk is searched): the rest costs another call.
    There is no index of words: it would take more room than the texts themselves. Raises StoreError.
    """
    found, end = Found(), clock() + seconds
    keys: list[int] = []
    match = _matcher(wanted)
    for chunk, following in _chunks(reader, where, after, newest_first, order):
        found.next = following
        for place, texts in chunk:
            found.searched += 1
            if match(texts):
                keys.append(place.key)
                if len(keys) == limit:
                    found.next = place if place is not chunk[-1][0] else following
                    break
        if len(keys) == limit or clock() >= end:
            break
    found.rows = reader.summaries(keys)
    return found


def count_matches(
    reader: RunReader,
    wanted: str,
    where: Filter | None = None,
    *,
    after: tuple[int, int] | None = None,
    newest_first: bool = False,
    order: Order = "step",
    seconds: float = 0.5,
    clock: Callable[[], float] = time.monotonic,
) -> Counted:
    """How many rollouts behind `after` a `search` would find, as far as so many seconds go. Raises StoreError."""
    counted, end = Counted(), clock() + seconds
    match = _matcher(wanted)
    for chunk, counted.next in _chunks(reader, where, after, newest_first, order):
        counted.matches += sum(match(texts) for _, texts in chunk)
        counted.searched += len(chunk)
        if clock() >= end:
            break
    return counted


Chunk = list[tuple[Cursor, bytes]]


def _chunks(
    reader: RunReader, where: Filter | None, after: tuple[int, int] | None, newest_first: bool, order: Order
) -> Iterator[tuple[Chunk, Cursor | None]]:
    """Places and packed texts, and where to go on."""
    cursor = Cursor(*after) if after else None
    while True:
        chunk, cursor = reader.page_of_texts(where, limit=CHUNK, after=cursor, newest_first=newest_first, order=order)
        yield chunk, cursor
        if cursor is None:
            return


def _matcher(wanted: str) -> Callable[[bytes], bool]:
    """Takes packed texts. Looks at the bytes first, which is fast, and then at what the messages say."""
    folded = wanted.casefold()
    quoted = json.dumps(folded, ensure_ascii=False)[1:-1]
    quoted_bytes = quoted.encode() if folded.isascii() else None

    def match(blob: bytes) -> bool:
        data = zlib.decompress(blob)
        if quoted_bytes is not None and quoted_bytes not in data.lower():
            return False  # a letter that folds to ASCII, such as the Kelvin sign, is not found: a price for the speed
        text = data.decode("utf-8", "surrogatepass")
        if quoted_bytes is None and quoted not in text.casefold():
            return False
        content = json.loads(text)
        fold = str.lower if quoted_bytes is not None else str.casefold
        return any(folded in fold(text) for text in _strings([content["messages"], content.get("completion")]))

    return match


def _strings(value: Any) -> Iterator[str]:
    """Every text inside, but for names of fields, roles and kinds of parts."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)
    elif isinstance(value, dict):
        for name, inner in value.items():
            if name not in ("role", "type"):
                yield from _strings(inner)
