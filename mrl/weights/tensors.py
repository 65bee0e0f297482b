"""Tensors in safetensors files: opened without a copy, and written into memory that stays.

Format: eight bytes with the header's length (little-endian), a JSON header of names, types, shapes and offsets, then
the tensors' bytes (github.com/huggingface/safetensors#format). Light to import: this also runs in
engines' own processes.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mrl.system.transfers import stream_to_host
from mrl.weights.checksum import combine, sums_of

FILE = "model.safetensors"
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_ALIGNMENT = 64
"""Bytes, of the first tensor; the others are aligned because the widest types are written first."""


class MadeTensors(Mapping[str, Tensor]):
    """Tensors that do not exist at once: each is made when it is looked up. No two of them are tied."""

    described: Mapping[str, Tensor]
    """What they will be: tensors of their shapes, dtypes and devices, without memory of their own."""


def described(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Tensors to read shapes, dtypes and devices from, without making any."""
    return tensors.described if isinstance(tensors, MadeTensors) else tensors


@contextmanager
def open_folder(folder: str | Path) -> Iterator[dict[str, Tensor]]:
    """The tensors of a folder's .safetensors files by name, as views of the files: valid inside the `with` only.

    Raises OSError or ValueError when there are none or they are cut short.
    """
    paths = sorted(Path(folder).glob("*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"{folder} holds no .safetensors file")
    tensors: dict[str, Tensor] = {}
    for path in paths:
        tensors.update(map_file(path))
    try:
        yield tensors
    finally:
        tensors.clear()


def map_file(path: Path) -> dict[str, Tensor]:
    """Views of the file's tensors; the mapping lives as long as one of them does. Raises OSError, ValueError."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        # A private mapping: torch wants writable memory, and what is written here never reaches the file.
        memory = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)) if size else memoryview(b"")
    header, start = read_header(memory, path)
    tensors = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        if start + last > size:
            raise ValueError(f"{path} is cut short: {name} ends at byte {start + last} of {size}")
        dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
        if first == last:
            tensors[name] = torch.empty(shape, dtype=dtype)
        else:
            count = (last - first) // dtype.itemsize
            tensors[name] = torch.frombuffer(memory, dtype=dtype, count=count, offset=start + first).reshape(shape)
    return tensors


def read_header(memory: memoryview | bytes, path: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """Entries by name, and where the tensors' bytes begin. Raises ValueError for what is no safetensors file."""
    if len(memory) < 8 or (start := 8 + struct.unpack("<Q", memory[:8])[0]) > len(memory):
        raise ValueError(f"{path} is cut short or no safetensors file")
    header = json.loads(bytes(memory[8:start]))
    header.pop("__metadata__", None)
    return header, start


def layout(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> tuple[bytes, dict[str, tuple[int, int]], int]:
    """A file's first bytes, (offset in the file, bytes) of each tensor, and the file's size.

    dtype: what floating-point tensors are written as; None = what they are.
    """
    types = {name: stored_dtype(tensor, dtype) for name, tensor in tensors.items()}
    entries, places, at = {}, {}, 0
    for name in sorted(tensors, key=lambda name: -types[name].itemsize):  # stable: otherwise in the given order
        size = tensors[name].numel() * types[name].itemsize
        entries[name] = {
            "dtype": _NAMES[types[name]],
            "shape": list(tensors[name].shape),
            "data_offsets": [at, at + size],
        }
        places[name] = (at, size)
        at += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    start = 8 + len(text)
    return struct.pack("<Q", len(text)) + text, {n: (start + o, s) for n, (o, s) in places.items()}, start + at


def stored_dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype a tensor is sent in: `dtype` for floating-point ones."""
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


@torch.no_grad()
def write_file(path: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> str:
    """Write tensors to a new file, as `dtype` where they are floating-point, and return their checksum. Raises OSError.

    For files that are written once: bytes given to the system are faster than pages of a new file mapped one by one.
    Each tensor's checksum is computed while it is written.
    """
    head, places, _ = layout(described(tensors), dtype)
    shares = {}
    with path.open("wb") as file, ThreadPoolExecutor(1) as beside:
        file.write(head)
        for name, here in stream_to_host(tensors, dtype, places):
            stored = here.contiguous()
            share = beside.submit(sums_of, name, stored)
            file.write(stored.reshape(-1).view(torch.uint8).numpy().data)
            shares[name] = share.result()
    return combine(shares)


class MappedFile:
    """A safetensors file whose tensors are overwritten in place.

    Kept open between versions: its pages are already there, so writing is one copy. On /dev/shm it is shared memory.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> None:
        self.path, self.dtype = path, dtype
        tensors = described(tensors)
        self.head, self.places, self.size = layout(tensors, dtype)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w+b") as file:
            os.posix_fallocate(file.fileno(), 0, self.size)  # a full disk is an error now, not a crash while writing
            self.memory = mmap.mmap(file.fileno(), self.size)
        self.memory[: len(self.head)] = self.head
        self.tensors = {}
        for name, tensor in tensors.items():
            offset, size = self.places[name]
            kind = stored_dtype(tensor, dtype)
            flat = (
                torch.frombuffer(self.memory, dtype=kind, count=size // kind.itemsize, offset=offset)
                if size
                else torch.empty(0, dtype=kind)
            )
            self.tensors[name] = flat.reshape(tensor.shape)

    def fits(self, tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> bool:
        """Whether these tensors have the names, types and shapes the file was made for."""
        return layout(described(tensors), dtype)[0] == self.head

    @torch.no_grad()
    def write(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy the tensors in, and return the file's own."""
        # On a device, cast before the transfer, so that it is smaller; in host memory the copy itself casts.
        dtype = None if all(tensor.is_cpu for tensor in described(tensors).values()) else self.dtype
        for name, here in stream_to_host(tensors, dtype):
            self.tensors[name].copy_(here)
        return self.tensors
