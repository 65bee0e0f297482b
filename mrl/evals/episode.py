"""A rollout's tokens as `ep logs` shows them: `execution_metadata.extra["full_episode"]` of a row."""

from __future__ import annotations

from typing import Any

from mrl.types import Rollout, Sample


class Episodes:
    """tokenizer: of the policy; None = an endpoint's, whose tokens nobody sees."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.texts: dict[int, str] = {}

    def of(self, rollout: Rollout) -> dict[str, Any] | None:
        """None where there are no tokens, or several sequences of them."""
        if self.tokenizer is None or len(rollout.samples) != 1:
            return None
        (sample,) = rollout.samples
        turns = turns_of(sample)
        told = [logprob if turn else None for logprob, turn in zip(sample.logprobs, turns, strict=True)]
        ids = [*sample.prompt_ids, *sample.completion_ids]
        before = len(sample.prompt_ids)
        return {
            "token_ids": ids,
            "mask": [0] * before + turns,
            "logprobs": [None] * before + told,
            "detokenized_tokens": [self._text(token_id) for token_id in ids],
            "num_turns": max(turns, default=0),
        }

    def _text(self, token_id: int) -> str:
        if token_id not in self.texts:
            self.texts[token_id] = str(self.tokenizer.decode([token_id]))
        return self.texts[token_id]


def turns_of(sample: Sample) -> list[int]:
    """For each token of the completion the policy's turn that it is of, from 1; 0 = the environment's."""
    turns, turn, before = [], 0, 0
    for mask in sample.mask:
        turn += mask > before
        turns.append(turn if mask else 0)
        before = mask
    return turns
