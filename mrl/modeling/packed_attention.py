"""Attention over rows that are stored without padding, and whose equal prompts are stored once.

Everything in a transformer but attention treats each token by itself, so a micro-batch can be one long line of tokens:
each distinct prompt once, then the completions that go on from it. Only attention needs rows: it gathers them, block by
block of about equal lengths, and takes each token's result back to the line. On a line of G completions of one prompt,
all that is not attention costs one prompt instead of G, and no padding at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from mrl.modeling.gather import Gather, make_gather
from mrl.system.transfers import to_device

BLOCK_SHORTEST = 0.75
"""A block's shortest row has at least this share of its longest one's tokens; shorter rows start another block."""


class NotPackableError(ValueError):
    """A model asks for something in its attention that packed rows cannot give."""


@dataclass(frozen=True)
class Line:
    """Rows as one line of N tokens. A row may begin with tokens that another row has too."""

    ids_1N: Tensor
    positions_1N: Tensor
    blocks: list[tuple[int, int]]
    """(rows, longest) of each block. M is the sum of their products: the places in all blocks."""
    to_places: Gather
    """N → M: which token of the line stands at each place; the first where a row is padded, on the right."""
    to_line: Gather
    """M → N: one place of each token."""
    no_mask: Tensor
    """Given to the model as its mask, so that it makes none."""

    def inputs(self) -> dict[str, Any]:
        """What a decoder is called with to compute the line."""
        return {
            "input_ids": self.ids_1N,
            "position_ids": self.positions_1N,
            "attention_mask": self.no_mask,
            "use_cache": False,
            "line": self,
        }


def make_line(
    prompts: list[list[int]], completions: list[list[int]], device: torch.device
) -> tuple[Line, list[np.ndarray]]:
    """Rows of prompt + completion as a line, equal prompts once; and where each row's tokens stand in the line."""
    ids: list[list[int]] = []
    positions: list[np.ndarray] = []
    prompt_places: dict[tuple[int, ...], np.ndarray] = {}
    rows: list[np.ndarray] = []
    length = 0

    def append(tokens: list[int], position: int) -> np.ndarray:
        nonlocal length
        ids.append(tokens)
        positions.append(np.arange(position, position + len(tokens)))
        length += len(tokens)
        return np.arange(length - len(tokens), length)

    for prompt, completion in zip(prompts, completions, strict=True):
        key = tuple(prompt)
        if key not in prompt_places:
            prompt_places[key] = append(prompt, 0)
        rows.append(np.concatenate([prompt_places[key], append(completion, len(prompt))]))

    blocks, token_M, filled_M = _blocks(rows)
    filled_P = np.nonzero(filled_M)[0]
    first_N = filled_P[np.unique(token_M[filled_P], return_index=True)[1]]
    line = Line(
        ids_1N=to_device(device, torch.from_numpy(np.concatenate([np.asarray(part, dtype=np.int64) for part in ids])))[
            None
        ],
        positions_1N=to_device(device, torch.from_numpy(np.concatenate(positions).astype(np.int64)))[None],
        blocks=blocks,
        to_places=make_gather(token_M, device, filled_M),
        to_line=make_gather(first_N, device),
        no_mask=torch.empty(1, 1, 0, 0, device=device),
    )
    return line, rows


def _blocks(rows: list[np.ndarray]) -> tuple[list[tuple[int, int]], np.ndarray, np.ndarray]:
    """Blocks of rows of about equal length, what stands at each of their places, and which places are not padding."""
    order = sorted(range(len(rows)), key=lambda row: len(rows[row]), reverse=True)
    cuts = [0]
    for index, row in enumerate(order):
        if len(rows[row]) < BLOCK_SHORTEST * len(rows[order[cuts[-1]]]):
            cuts.append(index)
    blocks, tokens, filled = [], [], []
    for first, end in pairwise([*cuts, len(order)]):
        longest = len(rows[order[first]])
        blocks.append((end - first, longest))
        for row in order[first:end]:
            padding = longest - len(rows[row])
            tokens.append(np.pad(rows[row], (0, padding)))
            filled.append(np.arange(longest) < len(rows[row]))
    return blocks, np.concatenate(tokens), np.concatenate(filled)


@torch.compiler.disable
def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    line: Line,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention within the rows of `line`, as transformers' attention functions are called.

    query: [1, heads, N, D]; key, value: [1, groups, N, D]. Returns ([1, N, heads, D], None). Raises NotPackableError.
    """
    if attention_mask is not line.no_mask:
        raise NotPackableError("this model makes a mask of its own for its attention")
    unknown = [
        name for name, value in others.items() if value is not None and value is not False and name not in _HARMLESS
    ]
    if unknown or not (is_causal if is_causal is not None else getattr(module, "is_causal", True)):
        raise NotPackableError(f"attention with {', '.join(unknown) or 'a look to the right'}")
    if _windows is not None:
        _windows.append(sliding_window)
    query_MF, key_MF, value_MF = (_rows(states, line) for states in (query, key, value))
    outputs, start = [], 0
    for rows, longest in line.blocks:
        end = start + rows * longest
        mask = _window(longest, sliding_window, query.device)
        query_BhLD, key_BgLD, value_BgLD = (
            states_MF[start:end].view(rows, longest, states.shape[1], states.shape[3]).transpose(1, 2)
            for states_MF, states in ((query_MF, query), (key_MF, key), (value_MF, value))
        )
        output, _ = sdpa_attention_forward(
            module, query_BhLD, key_BgLD, value_BgLD, mask, dropout=dropout, scaling=scaling, is_causal=True
        )
        outputs.append(output.reshape(rows * longest, -1))
        start = end
    output_MF = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return line.to_line(output_MF).view(1, -1, query.shape[1], value.shape[3]), None


_HARMLESS = {"position_ids", "use_cache", "cache_position", "output_attentions", "output_hidden_states", "return_dict"}


_windows: list[int | None] | None = None


@contextmanager
def watch_windows() -> Iterator[list[int | None]]:
    """The sliding windows that attention is called with meanwhile."""
    global _windows
    _windows = []
    try:
        yield _windows
    finally:
        _windows = None


def _rows(states: Tensor, line: Line) -> Tensor:
    """[1, heads, N, D] → M × heads·D."""
    return line.to_places(states[0].transpose(0, 1).flatten(1))


def _window(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """The mask of a sliding window, where it reaches less far than the row; True = seen."""
    if window is None or length <= window:
        return None
    place = torch.arange(length, device=device)
    distance = place[:, None] - place[None]
    return ((distance >= 0) & (distance < window))[None, None]
