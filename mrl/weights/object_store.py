"""Weights in Ray's object store: written once into the actor's node's memory, read from there without a copy.

An object holds pieces of files as numpy arrays of bytes, which Ray neither pickles nor copies for readers; other nodes
get each object once, whatever the number of their workers. What is read is put together as a safetensors file in
memory, which every engine can load.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mrl.errors import SyncError
from mrl.system.transfers import stream_to_host
from mrl.weights.checksum import combine, sums_of
from mrl.weights.tensors import FILE, layout

SMALL = 1 << 20
"""Bytes; smaller tensors go together in one object."""

Piece = tuple[str, int, Any]
"""Name of a file, offset in it, bytes as an array."""


@dataclass
class Stored:
    """Where to find the files of one version. The objects are there as long as one of these is, in any process."""

    sizes: dict[str, int]
    """Bytes, by name of the file."""
    objects: list[Any] = field(repr=False)
    """References to lists of `Piece`s."""


@torch.no_grad()
def put_tensors(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> tuple[Stored, str]:
    """Store tensors as one safetensors file. Returns their checksum too. dtype: of what is stored, None = as they are.
    Raises SyncError."""
    head, places, size = layout(tensors, dtype)
    shares: dict[str, Any] = {}

    def pieces() -> Iterator[Piece]:
        yield FILE, 0, np.frombuffer(head, np.uint8)
        for name, here in stream_to_host({name: tensors[name] for name in places}, dtype):
            stored = here.detach().contiguous()
            share = beside.submit(sums_of, name, stored)
            yield FILE, places[name][0], stored.reshape(-1).view(torch.uint8).numpy()
            shares[name] = share.result()

    with ThreadPoolExecutor(1) as beside:
        stored = Stored({FILE: size}, _put(pieces()))
    return stored, combine(shares)


def put_folder(folder: Path) -> Stored:
    """Store the files of a folder. Raises SyncError, OSError."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return Stored(
        {path.name: path.stat().st_size for path in files},
        _put((path.name, 0, np.fromfile(path, np.uint8)) for path in files),
    )


class StoredReader:
    """Puts versions together below `folder`, in place: pages of memory stay from version to version."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, mmap.mmap] = {}

    def read(self, stored: Stored) -> Path:
        """Returns the folder with the files. Raises SyncError, also when the actor's process or node is gone."""
        import ray
        from ray.exceptions import RayError

        try:
            if {name: len(memory) for name, memory in self.files.items()} != stored.sizes:
                self._make(stored.sizes)
            for pieces in ray.get(stored.objects):
                for name, offset, data in pieces:
                    self.files[name][offset : offset + len(data)] = data.data
        except RayError as error:
            raise SyncError(f"the weights cannot be had from Ray's object store: {error}") from error
        except OSError as error:
            raise SyncError(f"{self.folder}: no room for the weights ({error.strerror})") from error
        return self.folder

    def _make(self, sizes: Mapping[str, int]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.files.clear()
        for old in self.folder.iterdir():
            old.unlink()
        for name, size in sizes.items():
            with (self.folder / name).open("w+b") as file:
                os.posix_fallocate(file.fileno(), 0, size)  # a full disk is an error now, not a crash while writing
                self.files[name] = mmap.mmap(file.fileno(), size)


def _put(pieces: Iterable[Piece]) -> list[Any]:
    """Each large piece is an object, before the next is asked for: one copy, and no more of them in memory."""
    import ray
    from ray.exceptions import RayError

    objects, small = [], []
    try:
        for name, offset, data in pieces:
            if len(data) < SMALL:
                small.append((name, offset, data.copy()))
            else:
                objects.append(ray.put([(name, offset, data)]))
        return [*objects, ray.put(small)]
    except (RayError, OSError) as error:
        raise SyncError(f"the weights do not fit into Ray's object store: {error}") from error
