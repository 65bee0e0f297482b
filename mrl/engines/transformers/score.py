"""Teacher-forced logprobs for the `transformers` engine, with bounded logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mrl.engines.transformers.model import CausalLM
from mrl.system.transfers import to_device, to_host
from mrl.types import TokenSequence

MAX_LOGITS = 1 << 25
"""Logits of one forward (128 MiB in float32); the softmax needs as much again."""


def score(lm: CausalLM, sequences: Sequence[TokenSequence], batch_tokens: int) -> list[list[float]]:
    """Logprob of each completion token given all tokens before it, at each sequence's temperature."""
    results: list[list[float]] = [[] for _ in sequences]
    batches = list(_batches(sequences, batch_tokens))
    if batches:
        found = to_host(*(_score_batch(lm, [sequences[i] for i in batch]) for batch in batches))
        for batch, logprobs_BL in zip(batches, found, strict=True):
            for index, row in zip(batch, logprobs_BL.tolist(), strict=True):
                s = sequences[index]
                results[index] = row[len(s.prompt_ids) : len(s.prompt_ids) + len(s.completion_ids)]
    return results


def _batches(sequences: Sequence[TokenSequence], batch_tokens: int) -> Iterator[list[int]]:
    """Indices of sequences with a completion, by length, cut where rows x longest would exceed `batch_tokens`."""

    def length(index: int) -> int:
        return len(sequences[index].prompt_ids) + len(sequences[index].completion_ids)

    batch: list[int] = []
    for index in sorted((i for i, s in enumerate(sequences) if s.completion_ids), key=length):
        if batch and (len(batch) + 1) * length(index) > batch_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _score_batch(lm: CausalLM, sequences: list[TokenSequence]) -> Tensor:
    """The logprob of each token, [B, L]; 0 before the first column that holds a completion token.

    Rows are right-padded, so causality alone keeps padding out. Where the logits would be too large, the columns are
    computed in chunks with a KV cache.
    """
    tokens = [(*s.prompt_ids, *s.completion_ids) for s in sequences]  # with keys for images
    rows, columns = len(tokens), max(map(len, tokens)) - 1  # nothing follows the last token
    padded_BL = to_device(lm.device, [t + (0,) * (columns + 1 - len(t)) for t in tokens])
    temperature_B11 = to_device(lm.device, [s.temperature for s in sequences], torch.float32)[:, None, None]
    first = min(len(s.prompt_ids) for s in sequences) - 1  # the first column that predicts a completion token
    piece = max(1, MAX_LOGITS // (rows * lm.vocab_size))
    cache = lm.new_cache() if columns - first > piece else None

    logprobs_BL = torch.zeros(rows, columns + 1, device=lm.device)
    start = 0
    for logits_start in range(first, columns, piece):
        end = min(logits_start + piece, columns)
        positions_1T = torch.arange(start, end, device=lm.device)[None]
        given = {} if lm.images is None else lm.images.inputs(lm, tokens, [start] * rows, end - start)
        logits_BTV = lm.forward(padded_BL[:, start:end], positions_1T, None, cache, end - logits_start, given)
        target_BT = padded_BL[:, logits_start + 1 : end + 1].clamp(min=0)  # an image's keys are below 0
        logprobs_BL[:, logits_start + 1 : end + 1] = _token_logprobs(logits_BTV, target_BT, temperature_B11)
        start = end
    return logprobs_BL


def _token_logprobs(logits_BTV: Tensor, target_BT: Tensor, temperature_B11: Tensor) -> Tensor:
    scaled_BTV = logits_BTV.float() / temperature_B11
    chosen_BT = scaled_BTV.gather(-1, target_BT[:, :, None])[:, :, 0]
    return chosen_BT - scaled_BTV.logsumexp(dim=-1)
