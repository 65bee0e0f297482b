"""Weights as files: one safetensors file per version, complete or absent."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from mrl.errors import SyncError
from mrl.sync.checksum import checksum
from mrl.types import WeightRef


def publish(tensors: Mapping[str, Tensor], folder: Path, version: int) -> WeightRef:
    """Write `tensors` below `folder` as `version` and remove earlier versions. Raises SyncError."""
    from safetensors.torch import save_file

    final, partial = folder / f"v{version}", folder / f"v{version}.partial"
    unique = _without_aliases(tensors)
    try:
        partial.mkdir(parents=True)
        save_file({name: t.contiguous() for name, t in unique.items()}, str(partial / "model.safetensors"))
        os.replace(partial, final)
        for old in folder.iterdir():
            if old.name != final.name:
                shutil.rmtree(old)
    except OSError as error:
        raise SyncError(f"weights could not be written to {folder}: {error.strerror}; free space there") from error
    return WeightRef(version, path=str(final), checksum=checksum(unique))


def _without_aliases(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tied tensors once, under their first name (safetensors refuses shared memory)."""
    seen: set[tuple[int, tuple[int, ...]]] = set()
    unique = {}
    for name, tensor in tensors.items():
        key = (tensor.data_ptr(), tuple(tensor.shape))
        if tensor.numel() and key in seen:
            continue
        seen.add(key)
        unique[name] = tensor
    return unique
