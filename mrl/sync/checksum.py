"""A fingerprint of a policy's tensors, so that a worker can say what it holds."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

_ROW = 4096
"""Words summed into one: sums over both directions of a table of this width are the fingerprint."""


@torch.no_grad()
def checksum(tensors: Mapping[str, Tensor], names: Iterable[str] | None = None) -> str:
    """Fingerprint of the named tensors (default: all), whatever the device they are on.

    Each tensor's bytes, as 64-bit words in rows, are summed by row and by column: a changed, swapped or stale value
    shows, at the speed of reading the memory twice. Made against accidents, not against an adversary.
    """
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(tensors if names is None else names):
        tensor = tensors[name].detach()
        digest.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype};".encode())
        for sums in _sums(tensor.contiguous()):
            digest.update(sums.cpu().numpy().tobytes())
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
    return [table.sum(1), table.sum(0), tail, rest]
