"""A search of rollouts' texts over several requests: it lists a page of matches, then counts the others.

Each request takes a part of a second and says in its answer where the next one goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mrl.logs.rollout_query import PAGE, RolloutQuery, cursor_of, whole, written
from mrl.store.read import Cursor, RunReader
from mrl.store.search import count_matches, search

SECONDS = 0.4
"""Of a request."""
MOST = 10_000
"""Matches are counted until there are more."""


@dataclass
class Searched:
    """How far a search came."""

    listed: int
    """Matches that are listed, those of earlier requests included."""
    searched: int
    """Rollouts that were looked at up to the last one that is listed."""
    on: Cursor | None
    """Where the list goes on; None = there are no more."""
    more: int = 0
    """Matches behind those that are listed."""
    looked: int = 0
    """Rollouts that were looked at for these."""
    counting: Cursor | None = None
    """Where counting goes on; None = it has not begun, or has ended."""
    total: int | None = None
    """Of an earlier count that came to its end."""

    @property
    def matches(self) -> int:
        """So far, or in all."""
        return self.listed + self.more if self.total is None else self.total

    @property
    def lists(self) -> bool:
        """Whether the next request lists more by itself: the page is not full yet."""
        return self.on is not None and (self.listed == 0 or self.listed % PAGE != 0)

    @property
    def counts(self) -> bool:
        """Whether the next request counts."""
        return not self.lists and self.counting is not None

    @property
    def knows(self) -> bool:
        """Whether there are no more matches than those, or more than are counted."""
        return self.total is not None or not (self.lists or self.counts)

    def to_list(self) -> dict[str, Any]:
        """What a request says that lists more; a total that is known goes along."""
        total = self.matches if self.knows else None
        return {"listed": self.listed, "searched": self.searched, "on": written(self.on), "total": total}

    def to_count(self) -> dict[str, Any]:
        """What a request says that counts on."""
        counted = {"more": self.more, "looked": self.looked, "counting": written(self.counting)}
        return {"listed": self.listed, "searched": self.searched, "on": written(self.on)} | counted


def search_on(
    reader: RunReader, query: RolloutQuery, params: Mapping[str, str]
) -> tuple[list[dict[str, Any]], Searched]:
    """The rows to show beneath those of earlier requests, and how far that came. Raises StoreError."""
    order: Any = {"newest_first": not query.up, "order": query.order, "seconds": SECONDS}
    listed, searched, on = whole(params, "listed"), whole(params, "searched"), cursor_of(params, "on")
    if (counting := cursor_of(params, "counting")) is not None:
        counted = count_matches(reader, query.text, query.where, after=counting, **order)
        more, looked = whole(params, "more") + counted.matches, whole(params, "looked") + counted.searched
        enough = listed + more > MOST
        return [], Searched(listed, searched, on, more, looked, None if enough else counted.next)
    found = search(reader, query.text, query.where, limit=PAGE - listed % PAGE, after=on, **order)
    state = Searched(listed + len(found.rows), searched + found.searched, found.next)
    state.total = whole(params, "total") or None
    if state.total is None and state.listed <= MOST:
        state.counting = state.on
    return found.rows, state
