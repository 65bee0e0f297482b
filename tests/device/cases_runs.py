"""Whole runs on a simulated accelerator: every sync method, resume, replay. Run by tests/test_simulated_device.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mrl.loop.replay import replay
from mrl.store.run import read_rows
from mrl.system.transfers import on_host, stream_to_host, to_host
from tests import simulated_device
from tests.device.cases_actor import LORA, make_actor
from tests.small_runs import record_of, run, same_weights

assert simulated_device  # torch has the device from here on

CPU = torch.arange(7)
METHODS = ["direct", "reload", "volume", "checkpoint", "delta"]


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    kept = ("train/", "reward")
    return [{k: v for k, v in row.items() if k.startswith(kept)} for row in read_rows(folder, "metrics")]


@pytest.fixture(scope="module")
def on_cpu(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "cpu"
    run(tiny_model, folder, max_steps=3)
    return folder


@pytest.mark.parametrize("method", METHODS)
def test_a_run_is_that_of_the_cpu(method: str, tiny_model: str, on_cpu: Path, tmp_path: Path) -> None:
    """Two workers; what they sample after a sync depends on the weights they got, and so does the second delta."""
    steps = 3 if method == "delta" else 2
    run(tiny_model, tmp_path / "run", device="sim", weight_sync_method=method, num_rollout_workers=2, max_steps=steps)
    for got, expected in zip(metrics_of(tmp_path / "run"), metrics_of(on_cpu)[:steps], strict=True):
        assert got == pytest.approx(expected, abs=1e-3, rel=1e-3)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_resumed_run_is_the_uninterrupted_one_and_can_be_replayed(
    lora: bool, tiny_model: str, tmp_path: Path
) -> None:
    adapter = {"use_lora": True, "lora_r": 4, "lora_dropout": 0.0} if lora else {}
    options = {"device": "sim", "weight_sync_method": "reload", **adapter}
    run(tiny_model, tmp_path / "whole", **options, max_steps=2)
    run(tiny_model, tmp_path / "parts", **options, max_steps=1)
    run(tiny_model, tmp_path / "parts", **options, max_steps=2, resume="auto")
    assert record_of(tmp_path / "parts") == record_of(tmp_path / "whole")
    assert same_weights(tmp_path / "parts", tmp_path / "whole")
    assert replay(tmp_path / "whole", 2).exact
    assert replay(tmp_path / "whole", 2, device="cpu").verdict != "different"


def test_an_adapter_is_written_from_the_device(tiny_model: str, tmp_path: Path) -> None:
    """What engines load that take adapters."""
    tensors = []
    for device in ("cpu", "sim"):
        actor = make_actor(tiny_model, device, **LORA)
        ref = actor.write_weights(str(tmp_path / device), 1, adapter=True)
        tensors.append(load_file(Path(ref.path or "") / "adapter_model.safetensors"))
    assert tensors[0].keys() == tensors[1].keys()
    assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])


def test_what_leaves_the_device_is_whole_and_shares_what_it_shared() -> None:
    """Copies arrive as late as they may; tensors may be written to as soon as the last one has left."""
    weight = torch.randn(5, 3).to("sim")
    tensors = {"a": weight, "tied": weight, "half": weight.bfloat16(), "ids": torch.arange(4).to("sim"), "host": CPU}
    expected = {name: tensor.cpu().clone() for name, tensor in tensors.items()}
    with simulated_device.waits() as found:
        for name, here in stream_to_host(tensors):
            assert torch.equal(here, expected[name])
    assert set(found) == {"synchronize"}
    held = on_host(tensors)
    weight.zero_()
    assert all(torch.equal(held[name], expected[name]) for name in tensors)
    assert held["a"] is held["tied"]
    assert held["host"].data_ptr() == CPU.data_ptr()
    narrow = on_host({"a": torch.ones(2).to("sim")}, torch.bfloat16)
    assert narrow["a"].dtype == torch.bfloat16


def test_several_small_tensors_come_in_one_piece() -> None:
    given = [torch.tensor([True, False, True]), torch.tensor(3.5, dtype=torch.float64), torch.arange(6).view(2, 3)]
    on_device = [tensor.to("sim") for tensor in given]
    with simulated_device.waits() as found:
        there = to_host(*on_device)
    assert found.total() == 1
    for mine, theirs in zip(there, given, strict=True):
        assert torch.equal(mine, theirs)
        assert mine.dtype == theirs.dtype
