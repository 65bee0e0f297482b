"""Weights as files: one folder per version, complete or absent."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from mrl.errors import SyncError
from mrl.system import scratch, shared_disk
from mrl.types import WeightKind, WeightRef
from mrl.weights.checksum import checksum
from mrl.weights.tensors import FILE, MadeTensors, write_file


def publish(
    tensors: Mapping[str, Tensor],
    folder: Path,
    version: int,
    *,
    dtype: torch.dtype | None = None,
    durable: bool = False,
    keep: int = 1,
) -> WeightRef:
    """Write `tensors` below `folder` as `version` and remove earlier versions. Raises SyncError.

    dtype: of what is written; None = as they are. durable: fsynced before the version appears, for readers on other
    machines. keep: versions to leave there, this one included.
    """
    unique = without_aliases(tensors)
    written: dict[str, str] = {}

    def fill(partial: Path) -> None:
        written["checksum"] = write_file(partial / FILE, unique, dtype)

    final = publish_folder(fill, folder, version, durable=durable, keep=keep)
    return WeightRef(version, path=str(final), checksum=written["checksum"], bytes=size_of(final))


def publish_folder(
    fill: Callable[[Path], None], folder: Path, version: int, *, durable: bool = False, keep: int = 1
) -> Path:
    """A folder for `version`, filled and then renamed into place; earlier ones are removed. Raises SyncError."""
    final, partial = folder / f"v{version}", folder / f"v{version}.partial"
    try:
        for leftover in (partial, final):
            shutil.rmtree(leftover, ignore_errors=True)
        partial.mkdir(parents=True)
        fill(partial)
        if durable:
            _to_disk(*partial.iterdir(), partial)
        os.replace(partial, final)
        if durable:
            _to_disk(folder)
        before = [path for path in versions(folder) if int(path.name[1:]) < version]
        for path in versions(folder):  # later ones are left over from a run that was resumed at an earlier step
            if path != final and path not in before[len(before) - keep + 1 :]:
                shutil.rmtree(path)
        if durable:
            shared_disk.commit(folder)
    except OSError as error:
        raise _not_written(folder, error) from error
    return final


def own(folder: Path) -> None:
    """Claim `folder` for this process, so that it is removed even if this process is killed. Raises SyncError."""
    try:
        scratch.claim(folder)
    except OSError as error:
        raise _not_written(folder, error) from error


def versions(folder: Path) -> list[Path]:
    """The complete versions below `folder`, the newest last."""
    found = [path for path in folder.glob("v*") if path.name[1:].isdigit()]
    return sorted(found, key=lambda path: int(path.name[1:]))


def size_of(folder: Path) -> int:
    """Bytes of the files in `folder`."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def adapter_ref(folder: Path, version: int) -> WeightRef:
    """The reference to a folder with an adapter's files (PEFT's names)."""
    from mrl.weights.tensors import open_folder

    kind: WeightKind = "adapter"
    with open_folder(folder) as tensors:
        return WeightRef(version, path=str(folder), kind=kind, checksum=checksum(tensors), bytes=size_of(folder))


def without_aliases(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Tied tensors once, under their first name."""
    if isinstance(tensors, MadeTensors):
        return tensors
    seen: set[tuple[int, tuple[int, ...]]] = set()
    unique = {}
    for name, tensor in tensors.items():
        key = (tensor.data_ptr(), tuple(tensor.shape))
        if tensor.numel() and key in seen:
            continue
        seen.add(key)
        unique[name] = tensor
    return unique


def _not_written(folder: Path, error: OSError) -> SyncError:
    return SyncError(f"weights could not be written to {folder}: {error.strerror}; free space there")


def _to_disk(*paths: Path) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
