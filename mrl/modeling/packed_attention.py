"""Attention over packed rows: no padding, and equal prompts stored once.

Everything in a transformer but attention treats each token by itself, so a micro-batch can be one packed sequence: each
distinct prompt once, followed by its completions. Only attention needs rows. It gathers them into blocks of about equal
length, and scatters each token's result back to the packed sequence. With G completions of one prompt, all layers but
attention compute one prompt instead of G, and no padding.
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
"""Within a block, every row has at least this share of the longest row's tokens; a shorter row starts a new block."""


class NotPackableError(ValueError):
    """A model's attention needs something that packed rows do not support."""


@dataclass(frozen=True)
class PackedSequence:
    """Rows packed into one sequence of N tokens. Rows may share their first tokens (a prompt)."""

    ids_1N: Tensor
    positions_1N: Tensor
    blocks: list[tuple[int, int]]
    """(rows, longest) of each block. M = Σ rows × longest: positions in all blocks, padding included."""
    to_places: Gather
    """N → M: the packed token at each block position; token 0 where a row is right-padded."""
    to_packed: Gather
    """M → N: one block position of each packed token."""
    no_mask: Tensor
    """Passed to the model as its mask, so that it builds none."""

    def inputs(self) -> dict[str, Any]:
        """The arguments for the decoder."""
        return {
            "input_ids": self.ids_1N,
            "position_ids": self.positions_1N,
            "attention_mask": self.no_mask,
            "use_cache": False,
            "packed": self,
        }


def pack_rows(
    prompts: list[list[int]], completions: list[list[int]], device: torch.device
) -> tuple[PackedSequence, list[np.ndarray]]:
    """Pack rows of prompt + completion, equal prompts once. Also returns each row's token indices in the sequence."""
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
    ids_N = np.concatenate([np.asarray(part, dtype=np.int64) for part in ids])
    packed = PackedSequence(
        ids_1N=to_device(device, torch.from_numpy(ids_N))[None],
        positions_1N=to_device(device, torch.from_numpy(np.concatenate(positions).astype(np.int64)))[None],
        blocks=blocks,
        to_places=make_gather(token_M, device, filled_M),
        to_packed=make_gather(first_N, device),
        no_mask=torch.empty(1, 1, 0, 0, device=device),
    )
    return packed, rows


def _blocks(rows: list[np.ndarray]) -> tuple[list[tuple[int, int]], np.ndarray, np.ndarray]:
    """Blocks of rows of about equal length, the packed token at each block position, and which are not padding."""
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
    packed: PackedSequence,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention within the rows of `packed`, as transformers' attention functions are called.

    query: [1, heads, N, D]; key, value: [1, groups, N, D]. Returns ([1, N, heads, D], None). Raises NotPackableError.
    """
    if attention_mask is not packed.no_mask:
        raise NotPackableError("this model makes a mask of its own for its attention")
    unknown = [
        name for name, value in others.items() if value is not None and value is not False and name not in _HARMLESS
    ]
    if unknown or not (is_causal if is_causal is not None else getattr(module, "is_causal", True)):
        raise NotPackableError(f"attention with {', '.join(unknown) or 'a look to the right'}")
    if _windows is not None:
        _windows.append(sliding_window)
    query_MF, key_MF, value_MF = (_rows(states, packed) for states in (query, key, value))
    outputs, start = [], 0
    for rows, longest in packed.blocks:
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
    return packed.to_packed(output_MF).view(1, -1, query.shape[1], value.shape[3]), None


_HARMLESS = {"position_ids", "use_cache", "cache_position", "output_attentions", "output_hidden_states", "return_dict"}


_windows: list[int | None] | None = None


@contextmanager
def watch_windows() -> Iterator[list[int | None]]:
    """Collects the sliding windows that packed attention is called with inside."""
    global _windows
    _windows = []
    try:
        yield _windows
    finally:
        _windows = None


def _rows(states: Tensor, packed: PackedSequence) -> Tensor:
    """[1, heads, N, D] → M × heads·D."""
    return packed.to_places(states[0].transpose(0, 1).flatten(1))


def _window(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """The sliding-window mask, True = attended; None where the window covers the row."""
    if window is None or length <= window:
        return None
    place = torch.arange(length, device=device)
    distance = place[:, None] - place[None]
    return ((distance >= 0) & (distance < window))[None, None]
