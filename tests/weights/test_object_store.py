"""Weights through Ray's object store."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mrl.weights.checksum import checksum
from mrl.weights.object_store import SMALL, StoredReader, put_folder, put_tensors
from mrl.weights.tensors import open_folder

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


def test_versions_arrive_as_they_were_stored_and_are_freed(tmp_path: Path) -> None:
    import ray
    from ray._private.internal_api import memory_summary

    reader, here = StoredReader(tmp_path / "stored"), ray.get_runtime_context().gcs_address
    for version, dtype in enumerate([None, None, torch.bfloat16]):
        tensors = {
            "large": torch.randn(SMALL // 2, requires_grad=True),
            "small": torch.randn(3, 5).to(torch.bfloat16),
            "numbers": torch.arange(7 + version),
            "none": torch.empty(0, 4),
            "turned": torch.randn(4, 6).T,
        }
        stored, found = put_tensors(tensors, dtype)
        with open_folder(reader.read(stored)) as held:
            for name, tensor in tensors.items():
                wanted = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
                assert torch.equal(held[name], wanted.detach()), name
                assert held[name].dtype == wanted.dtype
            assert checksum(held) == found
        assert len(stored.objects) == 2
        ids = [reference.hex() for reference in stored.objects]
        summary = memory_summary(here, stats_only=False)
        assert all(one in summary for one in ids)
    del stored
    summary = memory_summary(here, stats_only=False)
    assert not any(one in summary for one in ids)
    assert ray.is_initialized()


def test_files_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    contents = {"adapter_config.json": b"{}", "adapter_model.safetensors": bytes(range(256)) * 8192}
    for name, content in contents.items():
        (tmp_path / "adapter" / name).write_bytes(content)
    folder = StoredReader(tmp_path / "stored").read(put_folder(tmp_path / "adapter"))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == contents
