"""Weight deltas: what changed between two versions, bit-exact and compressed; and the copy a reader applies them to.

After one optimizer step most bfloat16 weights have the bits they had before. For each tensor the file holds one bit
per element (did it change?) and the changed elements' new bytes, byte planes apart, so that the nearly constant sign
and exponent bytes compress.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mrl.errors import SyncError
from mrl.system.transfers import on_host
from mrl.types import WeightRef
from mrl.weights.checksum import checksum
from mrl.weights.files import publish_folder, size_of
from mrl.weights.tensors import FILE, MappedFile, map_file, write_file

DELTA_FILE, HEADER_FILE = "delta.bin", "delta.json"
_LEVEL = 1
"""zlib's: higher levels gain little on weights and cost ten times as much."""


class DeltaWriter:
    """The publishing side: keeps what was published last, in the dtype it was published in."""

    def __init__(self) -> None:
        self.last: dict[str, Tensor] = {}
        self.version: int | None = None

    @torch.no_grad()
    def publish(
        self,
        tensors: Mapping[str, Tensor],
        folder: Path,
        version: int,
        *,
        dtype: torch.dtype | None,
        full: bool,
        durable: bool = False,
    ) -> WeightRef:
        """Write `version` below `folder`: the delta from the last one, or with `full` everything.

        The checksum covers all tensors once the delta is applied. Raises SyncError.
        """
        now = on_host(tensors, dtype)
        same_kind = {n: (t.shape, t.dtype) for n, t in now.items()} == {
            n: (t.shape, t.dtype) for n, t in self.last.items()
        }
        base = self.version if same_kind and not full else None

        def fill(partial: Path) -> None:
            if base is None:
                write_file(partial / FILE, now, None)
            else:
                _write_delta(partial, self.last, now)

        self.version = None  # should writing fail, the next version is a full one
        path = publish_folder(fill, folder, version, durable=durable, keep=2)
        for name, tensor in now.items():
            if name in self.last and same_kind:
                self.last[name].copy_(tensor)
            else:
                self.last[name] = tensor.clone()
        self.version = version
        return WeightRef(version, path=str(path), kind="delta", checksum=checksum(now), bytes=size_of(path), base=base)

    def last_whole(self, folder: Path, version: int, *, durable: bool = False) -> WeightRef:
        """All weights as last published, for a new reader. Raises SyncError."""
        if version != self.version:
            raise SyncError(f"version {version} is not the one published last ({self.version})")

        def fill(partial: Path) -> None:
            write_file(partial / FILE, self.last, None)

        path = publish_folder(fill, folder, version, durable=durable)
        return WeightRef(version, path=str(path), kind="delta", checksum=checksum(self.last), bytes=size_of(path))


class DeltaReader:
    """The receiving side: a folder with all tensors, brought from version to version.

    folder: of its own, best on memory or a local disk; its file is what the engine loads.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file: MappedFile | None = None
        self.version: int | None = None

    def apply(self, ref: WeightRef) -> WeightRef:
        """Bring the folder to `ref`'s version; returns a reference to it as plain weights. Raises SyncError.

        Refuses a delta against a version that is not held, and one whose result has another checksum; the copy is then
        invalid until a full version arrives.
        """
        assert ref.path is not None
        if ref.base is not None and ref.base != self.version:
            raise SyncError(f"version {ref.version} changes version {ref.base}, and this worker holds {self.version}")
        self.version = None
        try:
            if ref.base is None:
                given = map_file(Path(ref.path) / FILE)
                self.file = MappedFile(self.folder / FILE, given, None)
                self.file.write(given)
            else:
                assert self.file is not None
                _read_delta(Path(ref.path), self.file.tensors)
        except (OSError, ValueError, KeyError, zlib.error) as error:
            raise SyncError(f"{ref.path} cannot be read: {error}") from error
        found = checksum(self.file.tensors)
        if found != ref.checksum:
            raise SyncError(f"version {ref.version} has checksum {found} here, expected {ref.checksum}")
        self.version = ref.version
        return WeightRef(ref.version, path=str(self.folder), checksum=found, bytes=self.file.size)


def _write_delta(folder: Path, last: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> None:
    entries: dict[str, Any] = {}
    with (folder / DELTA_FILE).open("wb") as out:
        for name, tensor in now.items():
            old, new = _words(last[name]), _words(tensor)
            changed = old != new
            count = int(changed.sum())
            if count == 0:
                continue
            parts = [zlib.compress(np.packbits(changed).tobytes(), _LEVEL)]
            planes = new[changed].view(np.uint8).reshape(count, -1)
            parts += [
                zlib.compress(np.ascontiguousarray(planes[:, i]).tobytes(), _LEVEL) for i in range(planes.shape[1])
            ]
            entries[name] = {"count": count, "parts": [len(part) for part in parts]}
            out.writelines(parts)
    (folder / HEADER_FILE).write_text(json.dumps(entries))


def _read_delta(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    entries: dict[str, Any] = json.loads((folder / HEADER_FILE).read_text())
    with (folder / DELTA_FILE).open("rb") as file:
        for name, entry in entries.items():
            words = _words(tensors[name])
            packed, *planes = [zlib.decompress(file.read(size)) for size in entry["parts"]]
            changed = np.unpackbits(np.frombuffer(packed, np.uint8), count=words.size).view(bool)
            new = np.empty((entry["count"], len(planes)), np.uint8)
            for index, plane in enumerate(planes):
                new[:, index] = np.frombuffer(plane, np.uint8)
            words[changed] = new.view(words.dtype).reshape(-1)


def _words(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The elements' bits as integers, sharing the tensor's memory."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    array: np.ndarray[Any, Any] = tensor.reshape(-1).view(kind).numpy()
    return array
