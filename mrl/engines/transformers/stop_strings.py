"""Finding stop strings in completions during decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARGIN_TOKENS = 8
"""Tokens to detokenize beyond the longest stop string: for characters of several tokens, and for the first token of a
tail, which some tokenizers strip or render differently."""

_MIN_TAIL_TOKENS = 32


class StopStrings:
    """Which rows of a batch contain one of their stop strings. Belongs to an engine, and caches what it learns.

    A row ends at the first token after which a stop string occurs in the text of its completion, special tokens
    included. The completion is detokenized only after a token that can complete one of the row's strings; whether a
    token can is determined when it is first sampled, and kept in a table. Only a tail long enough for the whole string
    is detokenized (every token spells at least one byte); a hit there is confirmed on the whole completion.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.any = False
        self._tokenizer = tokenizer
        self._known: dict[tuple[str, ...], Tensor] = {}
        self._anchor: list[int] = []
        self._anchor_text = ""

    @property
    def has_tokenizer(self) -> bool:
        """Whether stop strings are supported: they need a tokenizer."""
        return self._tokenizer is not None

    def set_rows(self, stops_B: Sequence[tuple[str, ...]], vocab_size: int) -> None:
        """Set the stop strings of each row of the batch; without a tokenizer there must be none."""
        self._stops_B = stops_B
        self.any = any(stops_B)
        if not self.any:
            return
        assert self._tokenizer is not None
        if not self._anchor:
            self._anchor = self._tokenizer.encode("a", add_special_tokens=False)
            self._anchor_text = self._decode(self._anchor)
        for stops in set(stops_B):
            table = self._known.get(stops)
            if table is None or len(table) != vocab_size:
                self._known[stops] = torch.full((vocab_size,), bool(stops))
        self._sets = list(dict.fromkeys(stops_B))
        self._set_B = torch.tensor([self._sets.index(stops) for stops in stops_B])
        self._possible_SV = torch.stack([self._known[stops] for stops in self._sets])

    def found(self, ids_BT: Tensor, step_B: Tensor, token_B: Tensor, wanted_B: Tensor) -> Tensor:
        """For each wanted row, whether token number `step_B`, stored in `ids_BT`, completed a stop string. [B] bool.

        All in host memory.
        """
        hit_B = self._possible_SV[self._set_B, token_B] & wanted_B
        rows = hit_B.nonzero()[:, 0]
        for row, step, token in zip(rows.tolist(), step_B[rows].tolist(), token_B[rows].tolist(), strict=True):
            stops = self._stops_B[row]
            if not self._can_complete(token, stops):
                self._known[stops][token] = False
                self._possible_SV[self._sets.index(stops), token] = False
            hit_B[row] = self._occurs(ids_BT[row, : step + 1], stops)
        return hit_B

    def _can_complete(self, token: int, stops: tuple[str, ...]) -> bool:
        """Whether one of `stops` can end inside the token's text. True where that cannot be told: parts of characters,
        or a stop string that ends in white space, which some tokenizers insert between tokens."""
        text = self._decode([*self._anchor, token])
        if not text.startswith(self._anchor_text):
            return True
        text = text[len(self._anchor_text) :]
        if not text:
            return True
        if "\ufffd" in text:  # it holds a part of a character
            return any(stop[-1] in text or not stop[-1].isascii() for stop in stops)
        return any(
            stop[-1].isspace() or stop in text or any(stop.endswith(text[:n]) for n in range(1, len(text) + 1))
            for stop in stops
        )

    def _occurs(self, ids_T: Tensor, stops: tuple[str, ...]) -> bool:
        tail = max(_MIN_TAIL_TOKENS, max(len(stop.encode()) for stop in stops) + _MARGIN_TOKENS)
        if not self._contains(ids_T[-tail:].tolist(), stops):
            return False
        return len(ids_T) <= tail or self._contains(ids_T.tolist(), stops)

    def _contains(self, ids: list[int], stops: tuple[str, ...]) -> bool:
        text = self._decode(ids)
        return any(stop in text for stop in stops)

    def _decode(self, ids: list[int]) -> str:
        assert self._tokenizer is not None
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
