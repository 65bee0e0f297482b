"""Transfers where both sides are the CPU: nothing is copied without need. On a device: tests/device/cases_runs.py."""

from __future__ import annotations

import pytest
import torch

from mrl.system.memory import claim, rounded, unclaimed
from mrl.system.transfers import on_host, stream_to_host, to_device, to_host, wait

CPU = torch.device("cpu")


def test_on_the_cpu_tensors_are_those_given() -> None:
    one, two = torch.arange(3), torch.ones(2, 2)
    assert to_host(one, two)[1] is two
    assert to_device(CPU, two) is two
    assert to_device(CPU, [1, 2], torch.float32).dtype == torch.float32
    tensors = {"a": one, "b": two, "c": two}
    assert all(here.data_ptr() == tensors[name].data_ptr() for name, here in stream_to_host(tensors))
    held = on_host(tensors, torch.bfloat16)
    assert held["a"].data_ptr() == one.data_ptr()
    assert held["b"].dtype == torch.bfloat16
    assert held["b"] is held["c"]


def test_the_device_that_is_waited_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's current one may be another; those without streams are not waited for."""
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    for name in ("cuda:1", "cpu", "mps", "meta"):
        wait(torch.device(name))
    assert waited == [torch.device("cuda:1")]


class Owner:
    """Somebody who takes memory."""


def test_budgets_are_the_machines_on_the_cpu_and_round() -> None:
    claim(owner := Owner(), CPU, 5)
    assert owner
    assert unclaimed(CPU) is None
    assert [rounded(n) for n in (0, 5, 7, 8, 9, 1000, 1023)] == [0, 5, 7, 8, 8, 896, 896]
