"""Splitting a step's rows into micro-batches. The update does not depend on the split: gradients add up."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mrl.system.memory import rounded
from mrl.types import Sample

CPU_TOKENS = 2048
"""Tokens of a micro-batch by default. On CPUs more take more memory and save no time."""
GPU_SHARE = 0.6
"""Share of a GPU's free memory that activations may use; not all, because their size is only estimated."""
MOST_GPU_TOKENS, FEWEST_GPU_TOKENS = 32768, 512
"""More tokens are no faster per token; with fewer the GPU is bound by kernel launches."""


def gpu_tokens(config: Any, free: int, *, narrow: bool, checkpointing: bool) -> int:
    """Tokens of a micro-batch whose activations fit into `GPU_SHARE` of `free` bytes; see `activation_bytes`."""
    each = activation_bytes(config, narrow=narrow, checkpointing=checkpointing)
    return min(MOST_GPU_TOKENS, max(FEWEST_GPU_TOKENS, rounded(int(GPU_SHARE * free) // each)))


def activation_bytes(config: Any, *, narrow: bool, checkpointing: bool) -> int:
    """What the layers keep of a token for the backward pass, estimated.

    config: the model's own, for its widths and layers. narrow: activations are 2 bytes under autocast. A layer keeps
    the residual stream and the norms' inputs and outputs in float32 (about 12 x hidden size), queries, keys, values and
    attention outputs (8 x hidden size), and the gated MLP's inner states (6 x intermediate size). With checkpointing
    each layer keeps only its input, and one layer at a time all of that.
    """
    hidden: int = config.hidden_size
    inner: int = getattr(config, "intermediate_size", None) or 4 * hidden
    size = 2 if narrow else 4
    one_layer = 4 * 12 * hidden + size * (8 * hidden + 6 * inner)
    layers: int = config.num_hidden_layers
    return 4 * hidden * layers + one_layer if checkpointing else one_layer * layers


def by_count(samples: Sequence[Sample], parts: int) -> list[list[int]]:
    """Indices of `parts` micro-batches with about equal row counts, longest rows first."""
    order = _by_length(samples)
    size, more = divmod(len(order), min(parts, len(order)))
    batches, start = [], 0
    for part in range(min(parts, len(order))):
        end = start + size + (part < more)
        batches.append(order[start:end])
        start = end
    return batches


def by_tokens(samples: Sequence[Sample], most: int, *, shared_prompts: bool) -> list[list[int]]:
    """Indices of micro-batches of at most `most` computed tokens; a longer row gets a micro-batch of its own.

    shared_prompts: rows are packed and equal prompts computed once, so they are grouped and counted once. Otherwise
    each row is padded to the longest of its micro-batch, and rows are sorted by length.
    """
    order = _by_prompt(samples) if shared_prompts else _by_length(samples)
    batches: list[list[int]] = []
    for index in order:
        if batches and _tokens((samples[i] for i in [*batches[-1], index]), shared_prompts) <= most:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


@dataclass(frozen=True)
class MicroBatch:
    """Some of a step's samples, by their indices. counts: whether they are this rank's own; others are computed where a
    rank has fewer micro-batches than another, since ranks gather weights together."""

    index: list[int]
    counts: bool = True


def of_rank(
    samples: Sequence[Sample],
    rank: int,
    ranks: int,
    split: Callable[[Sequence[Sample]], list[list[int]]],
    *,
    shared_prompts: bool,
) -> list[MicroBatch]:
    """A rank's micro-batches, as many as every rank's. split: cuts a rank's samples into micro-batches."""
    by_rank = []
    for share in shares(samples, ranks, shared_prompts=shared_prompts):
        parts = split([samples[i] for i in share]) if share else []
        by_rank.append([MicroBatch([share[i] for i in part]) for part in parts])
    own, most = by_rank[rank], max(len(parts) for parts in by_rank)
    shortest = min(range(len(samples)), key=lambda i: (not any(samples[i].mask), _length(samples[i])))
    return own + [MicroBatch([shortest], counts=False)] * (most - len(own))


def shares(samples: Sequence[Sample], ranks: int, *, shared_prompts: bool) -> list[list[int]]:
    """Indices of each rank's samples, of about equally many tokens; none is empty while there are enough samples.

    The rows of a prompt stay together, but for those at a border, so that it is computed about once.
    """
    if ranks == 1:
        return [list(range(len(samples)))]
    order = _by_prompt(samples) if shared_prompts else _by_length(samples)
    total = sum(_length(samples[i]) for i in order)
    found: list[list[int]] = [[] for _ in range(ranks)]
    rank, before = 0, 0
    for place, index in enumerate(order):
        tokens, left = _length(samples[index]), len(order) - place
        # The next rank begins where this row's middle is beyond the border, or when the rest has one row each.
        full = (before + tokens / 2) * ranks > total * (rank + 1) or left <= ranks - 1 - rank
        if found[rank] and rank < ranks - 1 and full:
            rank += 1
        found[rank].append(index)
        before += tokens
    return found


def _tokens(samples: Iterable[Sample], shared_prompts: bool) -> int:
    kept = list(samples)
    if shared_prompts:
        prompts = {sample.prompt_key for sample in kept}
        return sum(len(ids) for ids, _ in prompts) + sum(len(sample.completion_ids) for sample in kept)
    return len(kept) * max(_length(sample) for sample in kept)


def _by_length(samples: Sequence[Sample]) -> list[int]:
    return sorted(range(len(samples)), key=lambda index: -_length(samples[index]))


def _by_prompt(samples: Sequence[Sample]) -> list[int]:
    """Rows grouped by prompt; groups by their longest row, rows within a group by length, longest first."""
    longest: dict[Hashable, int] = {}
    first: dict[Hashable, int] = {}
    for index, sample in enumerate(samples):
        key = sample.prompt_key
        longest[key] = max(longest.get(key, 0), _length(sample))
        first.setdefault(key, index)

    def place(index: int) -> tuple[int, int, int]:
        key = samples[index].prompt_key
        return -longest[key], first[key], -_length(samples[index])

    return sorted(range(len(samples)), key=place)


def _length(sample: Sample) -> int:
    return len(sample.prompt_ids) + len(sample.completion_ids)
