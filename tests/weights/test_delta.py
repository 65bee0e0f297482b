"""Differences: bit for bit, small where little changed, refused where they do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from mrl.errors import SyncError
from mrl.weights.checksum import checksum
from mrl.weights.delta import DeltaReader, DeltaWriter


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 10_000),
    fraction=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_what_arrives_is_what_was_sent(
    seed: int, fraction: float, dtype: torch.dtype, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("delta")
    torch.manual_seed(seed)
    tensors = {"a": torch.randn(33, 17), "b": torch.randn(5), "empty": torch.zeros(0, 3), "n": torch.arange(7)}
    writer, reader = DeltaWriter(), DeltaReader(folder / "copy")
    for version in range(4):
        ref = writer.publish(tensors, folder / "sent", version, dtype=dtype, full=version == 2)
        assert ref.base == (None if version in (0, 2) else version - 1)
        held = reader.apply(ref)
        wanted = {n: t.to(dtype) if t.is_floating_point() else t for n, t in tensors.items()}
        got = load_file(f"{held.path}/model.safetensors")
        assert checksum(got) == checksum(wanted) == ref.checksum == held.checksum
        changes = {n: (torch.rand(t.shape) < fraction) for n, t in tensors.items()}
        tensors = {n: torch.where(changes[n], t * -1 + 1, t) for n, t in tensors.items()}


def test_small_updates_of_bfloat16_weights_are_small(tmp_path: Path) -> None:
    """Steps of the size that Adam takes at a learning rate of 1e-6 change few bfloat16 weights."""
    torch.manual_seed(0)
    weights = {"w": torch.randn(1000, 500) * 0.02}
    writer = DeltaWriter()
    whole = writer.publish(weights, tmp_path, 0, dtype=torch.bfloat16, full=True)
    weights["w"] = weights["w"] + torch.sign(torch.randn(1000, 500)) * 1e-6
    small = writer.publish(weights, tmp_path, 1, dtype=torch.bfloat16, full=False)
    assert small.bytes < whole.bytes / 8


def test_a_reader_that_missed_a_version_says_so_and_takes_everything(tmp_path: Path) -> None:
    weights = {"w": torch.zeros(8)}
    writer, reader, late = DeltaWriter(), DeltaReader(tmp_path / "one"), DeltaReader(tmp_path / "late")
    reader.apply(writer.publish(weights, tmp_path / "sent", 0, dtype=None, full=True))
    weights = {"w": torch.ones(8)}
    second = writer.publish(weights, tmp_path / "sent", 1, dtype=None, full=False)
    with pytest.raises(SyncError, match="changes version 0, and this worker holds None"):
        late.apply(second)
    reader.apply(second)
    whole = writer.last_whole(tmp_path / "whole", 1)
    assert late.apply(whole).checksum == second.checksum
    third = writer.publish({"w": torch.full((8,), 2.0)}, tmp_path / "sent", 2, dtype=None, full=False)
    assert late.apply(third).checksum == reader.apply(third).checksum
    fourth = writer.publish({"w": torch.full((8,), 3.0)}, tmp_path / "sent", 3, dtype=None, full=False)
    Path(fourth.path or "", "delta.bin").write_bytes(b"")
    with pytest.raises(SyncError, match="cannot be read"):
        reader.apply(fourth)
    with pytest.raises(SyncError, match="holds None"):
        reader.apply(writer.publish(weights, tmp_path / "sent", 4, dtype=None, full=False))
