"""Cutting a step's rows into micro-batches. The update does not depend on how: each adds its share of the gradient."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mrl.types import Sample

CPU_TOKENS = 2048
"""Tokens of a micro-batch by default. On CPUs more takes memory and no less time."""
GPU_TOKENS = 16384


def by_count(samples: Sequence[Sample], parts: int) -> list[list[int]]:
    """Indices of `parts` micro-batches of about equal row counts, the longest rows first."""
    order = _by_length(samples)
    size, more = divmod(len(order), min(parts, len(order)))
    batches, start = [], 0
    for part in range(min(parts, len(order))):
        end = start + size + (part < more)
        batches.append(order[start:end])
        start = end
    return batches


def by_tokens(samples: Sequence[Sample], most: int, *, shared_prompts: bool) -> list[list[int]]:
    """Indices of micro-batches of at most `most` tokens, as the model computes them; a longer row is one by itself.

    shared_prompts: rows go through the model without padding and equal prompts once, so they are kept together and
    counted once. Otherwise each row counts as long as the longest of its micro-batch, and rows are sorted by length.
    """
    order = _by_prompt(samples) if shared_prompts else _by_length(samples)
    batches: list[list[int]] = []
    for index in order:
        if batches and _tokens((samples[i] for i in [*batches[-1], index]), shared_prompts) <= most:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def _tokens(samples: Iterable[Sample], shared_prompts: bool) -> int:
    kept = list(samples)
    if shared_prompts:
        prompts = {tuple(sample.prompt_ids) for sample in kept}
        return sum(map(len, prompts)) + sum(len(sample.completion_ids) for sample in kept)
    return len(kept) * max(_length(sample) for sample in kept)


def _by_length(samples: Sequence[Sample]) -> list[int]:
    return sorted(range(len(samples)), key=lambda index: -_length(samples[index]))


def _by_prompt(samples: Sequence[Sample]) -> list[int]:
    """Rows with equal prompts beside each other, the group with the longest row first, in it the longest row first."""
    longest: dict[tuple[int, ...], int] = {}
    first: dict[tuple[int, ...], int] = {}
    for index, sample in enumerate(samples):
        key = tuple(sample.prompt_ids)
        longest[key] = max(longest.get(key, 0), _length(sample))
        first.setdefault(key, index)

    def place(index: int) -> tuple[int, int, int]:
        key = tuple(samples[index].prompt_ids)
        return -longest[key], first[key], -_length(samples[index])

    return sorted(range(len(samples)), key=place)


def _length(sample: Sample) -> int:
    return len(sample.prompt_ids) + len(sample.completion_ids)
