"""Keys and values of conversations between their turns.

What a finished request leaves in its row of the KV cache is copied out under its session, and the session's next
request prefills only what follows. Another session's states serve too, as far as their tokens are the same: attempts at
one task begin alike. Least recently used ones go when memory is short, and all of them when the weights change.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from mrl.engines.transformers.kv_cache import RowStates

BLOCK = 16
"""Beginnings of other sessions are found by whole blocks of this many tokens; shorter ones are not worth the copies."""


@dataclass(frozen=True, slots=True)
class _Kept:
    tokens: tuple[int, ...]
    states: RowStates
    blocks: list[int]
    """A hash for each whole block, of all tokens up to its end."""


class PrefixCache:
    """The states of one conversation per session, at most `max_bytes` in all. Used by one thread."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        """The first one goes first."""
        self._session_of: dict[int, str] = {}
        """The session that last had a block, by the block's hash."""

    def __len__(self) -> int:
        """Sessions kept."""
        return len(self._kept)

    def keep(self, session: str, tokens: tuple[int, ...], states: RowStates) -> None:
        """Keep the states of these tokens, in the place of the session's earlier ones."""
        self._drop(session)
        if states.nbytes > self.max_bytes or len(tokens) < BLOCK:
            return
        while self.bytes + states.nbytes > self.max_bytes:
            self._drop(next(iter(self._kept)))
        kept = self._kept[session] = _Kept(tokens, states, _block_hashes(tokens))
        self._session_of.update(dict.fromkeys(kept.blocks, session))
        self.bytes += states.nbytes

    def find(self, session: str, tokens: tuple[int, ...]) -> RowStates | None:
        """The states of the longest known beginning of `tokens`, without the last token, whose logits are wanted. None
        where it is too short to be used."""
        if not self._kept:
            return None
        candidates = [session] if session in self._kept else []
        if not candidates or self._shared(session, tokens) < len(self._kept[session].tokens):
            blocks = _block_hashes(tokens)
            candidates += [s for s in (self._session_of.get(block) for block in reversed(blocks)) if s is not None][:1]
        shared, best = max(((self._shared(s, tokens), s) for s in candidates), default=(0, ""))
        if shared < BLOCK:
            return None
        # A conversation that goes on is kept anew when its request ends; until then it is the first to go.
        self._kept.move_to_end(best, last=best != session)
        return self._kept[best].states.first(shared)

    def clear(self) -> None:
        """Forget all: they are of other weights."""
        self._kept.clear()
        self._session_of.clear()
        self.bytes = 0

    def _shared(self, session: str, tokens: tuple[int, ...]) -> int:
        """How many tokens of a session `tokens` begins with, of which at least one has to remain."""
        kept = self._kept[session].tokens
        low, high = 0, min(len(kept), len(tokens) - 1)
        if kept[:high] == tokens[:high]:
            return high
        while high - low > 1:  # the first `low` tokens are equal, the first `high` are not
            middle = (low + high) // 2
            if kept[low:middle] == tokens[low:middle]:
                low = middle
            else:
                high = middle
        return low

    def _drop(self, session: str) -> None:
        kept = self._kept.pop(session, None)
        if kept is None:
            return
        self.bytes -= kept.states.nbytes
        for block in kept.blocks:
            if self._session_of.get(block) == session:
                del self._session_of[block]


def _block_hashes(tokens: tuple[int, ...]) -> list[int]:
    found, before = [], 0
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        before = hash((before, tokens[start : start + BLOCK]))
        found.append(before)
    return found
