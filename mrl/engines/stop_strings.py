"""Finding stop strings in completions while they grow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mrl.errors import EngineError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARGIN_TOKENS = 8
"""Tokens decoded beyond the longest stop string: characters of several tokens, and the first token of a decoded tail,
which some tokenizers strip or render differently."""

_MIN_TAIL_TOKENS = 32


class StopStrings:
    """Which of N rows contain one of their stop strings.

    A row ends at the first token after which a stop string occurs in the decoded text of its completion. The text is
    decoded with special tokens, so that those can be named too. Each step decodes only a tail that is long enough to
    hold the whole string (every token spells at least one byte); a hit there is confirmed on the whole completion.
    """

    def __init__(self, stops_N: Sequence[tuple[str, ...]], tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.any = any(stops_N)
        self._stops_N = stops_N
        self._tail_N = [
            max(_MIN_TAIL_TOKENS, max((len(s.encode()) for s in stops), default=0) + _MARGIN_TOKENS)
            for stops in stops_N
        ]
        if self.any and tokenizer is None:
            raise EngineError("stop strings need a tokenizer: give the engine one, or use stop_token_ids")
        self._tokenizer = tokenizer

    def found(self, ids_NT: Tensor, row_B: Tensor, step: int, wanted_B: Tensor) -> Tensor:
        """For each row of the batch that is wanted, whether token number `step` completed a stop string. [B] bool."""
        hits = [
            wanted and bool(self._stops_N[row]) and self._occurs(ids_NT[row], step + 1, row)
            for row, wanted in zip(row_B.tolist(), wanted_B.tolist(), strict=True)
        ]
        return torch.tensor(hits, device=row_B.device)

    def _occurs(self, ids_T: Tensor, length: int, row: int) -> bool:
        start = max(0, length - self._tail_N[row])
        if not self._contains(ids_T[start:length].tolist(), row):
            return False
        return start == 0 or self._contains(ids_T[:length].tolist(), row)

    def _contains(self, ids: list[int], row: int) -> bool:
        assert self._tokenizer is not None
        text = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return any(stop in text for stop in self._stops_N[row])
