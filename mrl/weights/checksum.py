"""A fingerprint of a policy's tensors, so that a worker can say what it holds."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

THREADS = min(4, os.cpu_count() or 1)
"""Each sums one tensor at a time. More would only wait for memory bandwidth."""

_ROW = 4096
"""64-bit words in a row of the table whose row sums and column sums are the fingerprint."""

_PIECE = 32
"""Rows that stay in a processor's cache (1 MiB)."""


def checksum(tensors: Mapping[str, Tensor], names: Iterable[str] | None = None) -> str:
    """Fingerprint of the named tensors (default: all), whatever the device they are on.

    Each tensor's bytes, as 64-bit words in rows, are summed by row and by column: a changed, swapped or stale value
    shows, at about the speed of copying them, on up to `THREADS` threads. Made against accidents, not against an
    adversary.
    """
    wanted = list(tensors if names is None else names)
    with ThreadPoolExecutor(THREADS) as threads:
        return combine(dict(zip(wanted, threads.map(lambda name: sums_of(name, tensors[name]), wanted), strict=True)))


@torch.no_grad()
def sums_of(name: str, tensor: Tensor) -> bytes:
    """One tensor's share of the fingerprint, for callers that stream the tensors."""
    head = f"{name}:{tuple(tensor.shape)}:{tensor.dtype};".encode()
    return b"".join([head, *(sums.cpu().numpy().tobytes() for sums in _sums(tensor.detach().contiguous()))])


def combine(shares: Mapping[str, bytes]) -> str:
    """The fingerprint from all tensors' shares by name."""
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(shares):
        digest.update(shares[name])
    return digest.hexdigest()


def _sums(tensor: Tensor) -> list[Tensor]:
    """Exact in 64 bits (overflow wraps), so the order of adding does not matter: every device gets the same."""
    data = tensor.reshape(-1).view(torch.uint8)
    whole = data.numel() // 8 * 8
    if data[:whole].storage_offset() % 8:
        data = data.clone()
    words, rest = data[:whole].view(torch.int64), data[whole:].to(torch.int64)
    table = words[: words.numel() // _ROW * _ROW].view(-1, _ROW)
    tail = words[table.numel() :]
    if table.is_cpu and table.numel():
        return [*_in_cache(table), tail, rest]
    return [table.sum(1), table.sum(0), tail, rest]


def _in_cache(table: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of the rows and of the columns, a few rows at a time, so that the memory is read once.

    On one thread: torch would split each piece over several, which wait for each other on a busy machine.
    """
    data = table.numpy()
    rows, columns = np.empty(len(data), np.int64), np.zeros(_ROW, np.int64)
    for at in range(0, len(data), _PIECE):
        piece = data[at : at + _PIECE]
        np.add.reduce(piece, axis=1, out=rows[at : at + _PIECE])
        columns += np.add.reduce(piece, axis=0)
    return torch.from_numpy(rows), torch.from_numpy(columns)
