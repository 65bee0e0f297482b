"""Samples as bytes: exact, and about 5 to 7 bytes a token.

Integers take the narrowest width that holds all of them, and nothing when they are all equal (masks and policy
versions mostly are). Logprobs are float32 where that is exact, which it is for what came from a float32 tensor, and
float64 otherwise: a replay must see the numbers that were trained on. Bytes are stored plane by plane (all lowest
bytes, then all next ones), which deflate shrinks best.

    blob    = format byte, deflate(samples)
    samples = one after the other: JSON line {finish_reason, arrays: [[kind, count, constant], ...]}, arrays' bytes

Behind them are the arrays that are only looked at (`per_token`), in half precision. Where there are images the line
has their hashes, sizes and places; the files are beside the database (mrl/store/media.py).
"""

from __future__ import annotations

import json
import zlib
from array import array
from collections.abc import Iterable
from typing import Any

import numpy as np

from mrl.types import Sample

FORMAT = 1
DEFLATE_LEVEL = 1
"""Higher levels cost several times the time for a few per cent: the mantissas of logprobs do not compress."""

PER_TOKEN = ("trainer_gap", "advantages")
"""Only to be looked at: in half precision, and only where there are any."""
FIELDS = ("prompt_ids", "completion_ids", "mask", "logprobs", "policy_version")
WIDTHS = ("u1", "u2", "u4", "i8")


def encode_samples(samples: Iterable[Sample]) -> bytes:
    """Every sample of a rollout. Raises OverflowError or TypeError for what is no 64-bit integer or no float."""
    parts: list[bytes] = []
    for sample in samples:
        versions = sample.policy_version
        arrays = [
            _encode_integers(sample.prompt_ids),
            _encode_integers(sample.completion_ids),
            _encode_integers(sample.mask),
            _encode_floats(sample.logprobs),
            _encode_integers(versions) if isinstance(versions, list) else ("scalar", 1, int(versions), b""),
        ]
        header: dict[str, Any] = {"finish_reason": sample.finish_reason, "arrays": [entry[:3] for entry in arrays]}
        if sample.media:
            header["media"] = [
                {"sha256": image.sha256, "bytes": len(image.data), "start": image.start, "length": image.length}
                for image in sample.media
            ]
        looked_at = {name: _encode_half(values) for name in PER_TOKEN if (values := getattr(sample, name)) is not None}
        if looked_at:
            header["per_token"] = {name: entry[:3] for name, entry in looked_at.items()}
        parts += [json.dumps(header).encode(), b"\n", *(entry[3] for entry in [*arrays, *looked_at.values()])]
    return bytes([FORMAT]) + zlib.compress(b"".join(parts), DEFLATE_LEVEL)


def decode_samples(blob: bytes) -> list[dict[str, Any]]:
    """The samples as plain dicts, field by field what went in."""
    if blob[0] != FORMAT:
        raise ValueError(f"samples of format {blob[0]}, expected {FORMAT}")
    data = zlib.decompress(memoryview(blob)[1:])
    samples, at = [], 0
    while at < len(data):
        end = data.index(b"\n", at)
        header, at = json.loads(data[at:end]), end + 1
        sample: dict[str, Any] = {"finish_reason": header["finish_reason"]}
        for field, (kind, count, constant) in zip(FIELDS, header["arrays"], strict=True):
            size = 0 if kind in ("scalar", "constant") else count * np.dtype(kind).itemsize
            sample[field] = _decode(kind, count, constant, data[at : at + size])
            at += size
        for field, (kind, count, constant) in header.get("per_token", {}).items():
            size = 0 if kind == "constant" else count * np.dtype(kind).itemsize
            sample[field] = _decode(kind, count, constant, data[at : at + size])
            at += size
        if "media" in header:
            sample["media"] = header["media"]
        samples.append(sample)
    return samples


Encoded = tuple[str, int, int | None, bytes]
"""Kind, number of values, the value when all are equal, bytes."""


def _encode_integers(values: list[int]) -> Encoded:
    if not values:
        return "constant", 0, 0, b""
    low, high = min(values), max(values)
    if low == high:
        return "constant", len(values), int(low), b""
    kind = "i8" if low < 0 else WIDTHS[(high > 0xFF) + (high > 0xFFFF) + (high > 0xFFFFFFFF)]
    return kind, len(values), None, _planes(np.frombuffer(array("q", values), dtype="i8").astype(kind))


def _encode_floats(values: list[float]) -> Encoded:
    if not values:
        return "constant", 0, 0, b""
    exact = np.frombuffer(array("d", values), dtype="f8")
    with np.errstate(over="ignore"):
        short = exact.astype("f4")
    if short.astype("f8").tobytes() == exact.tobytes():
        return "f4", len(values), None, _planes(short)
    return "f8", len(values), None, _planes(exact)


def _encode_half(values: list[float]) -> Encoded:
    if not values or not any(values):
        return "constant", len(values), 0, b""
    with np.errstate(over="ignore"):
        return "f2", len(values), None, _planes(np.asarray(values, dtype="f2"))


def _decode(kind: str, count: int, constant: int | None, data: bytes) -> Any:
    if kind == "scalar":
        return constant
    if kind == "constant":
        return [constant] * count
    width = np.dtype(kind).itemsize
    planes = np.frombuffer(data, dtype="u1").reshape(width, count)
    return np.ascontiguousarray(planes.T).view(f"<{kind}").ravel().tolist()


def _planes(values: np.ndarray[Any, Any]) -> bytes:
    little = values.astype(values.dtype.newbyteorder("<"), copy=False)
    return np.ascontiguousarray(little.view("u1").reshape(len(values), -1).T).tobytes()
