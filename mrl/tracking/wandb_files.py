"""What W&B has written on this machine: `.wandb` files, protobufs in LevelDB's log format."""

from __future__ import annotations

import importlib
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILE_HEADER = 7
BLOCK = 32768
HEADER = struct.Struct("<IHB")  # checksum, length, kind
WHOLE, LAST = 1, 4


def last_step(folder: Path, run_id: str) -> int:
    """The last step in the files of this run's earlier parts; -1 when there is none."""
    steps = (
        record.history.step.num
        for path in folder.glob(f"*run-*-{run_id}*/run-{run_id}.wandb")
        for record in records(path)
        if record.WhichOneof("record_type") == "history"
    )
    return max(steps, default=-1)


def records(path: Path) -> Iterator[Any]:
    """The file's records, up to where a killed process left off."""
    from google.protobuf.message import DecodeError

    protocol = importlib.import_module("wandb.proto.wandb_internal_pb2")
    for data in _frames(path.read_bytes()):
        record = protocol.Record()
        try:
            record.ParseFromString(data)
        except DecodeError:
            return
        yield record


def _frames(data: bytes) -> Iterator[bytes]:
    at, parts = FILE_HEADER, b""
    while at + HEADER.size <= len(data):
        left_in_block = BLOCK - at % BLOCK
        if left_in_block < HEADER.size:
            at += left_in_block
            continue
        _, length, kind = HEADER.unpack_from(data, at)
        at += HEADER.size
        parts += data[at : at + length]
        if len(data) < at + length:
            return
        at += length
        if kind in (WHOLE, LAST):
            yield parts
            parts = b""
