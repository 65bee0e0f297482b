"""What the vLLM process serves when an update of its weights does not go as it should, with a stand-in for vLLM: the
real one cannot be made to fail in one of its workers, or at a given moment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mrl.weights.tensors import write_file

pytestmark = pytest.mark.vllm

OLD, NEW = "old", "new"


class LLM:
    """vLLM with two workers. update: what `update_weights` does to them."""

    def __init__(self, update: Callable[[list[dict[str, Any]]], None]) -> None:
        self.update = update
        self.workers = [{"checksum": OLD, "whole": True, "seconds": 0.1} for _ in range(2)]
        self.entered = asyncio.Event()
        self.hangs = False
        self.version = "1"

    async def update_weights(self, request: Any) -> None:
        self.entered.set()
        if self.hangs:
            await asyncio.sleep(600)
        self.update(self.workers)

    async def add_lora(self, request: Any) -> bool:
        self.entered.set()
        await asyncio.sleep(600 if self.hangs else 0.05)
        return True

    async def finish_weight_update(self, version: str) -> None:
        self.version = version

    async def update_weight_version(self, version: str) -> None:
        self.version = version

    async def collective_rpc(self, method: str) -> list[dict[str, Any]]:
        assert method == "mrl_held"
        return self.workers

    async def nothing(self, *_: Any, **__: Any) -> None:
        """Of no consequence here."""

    start_weight_update = pause_generation = resume_generation = nothing


def loaded(workers: list[dict[str, Any]]) -> None:
    for worker in workers:
        worker["checksum"] = NEW


def refused(workers: list[dict[str, Any]]) -> None:
    raise ValueError("the folder has another checksum")


def refused_by_one(workers: list[dict[str, Any]]) -> None:
    workers[0]["checksum"] = NEW
    raise ValueError("the folder is not there")


def broken_off(workers: list[dict[str, Any]]) -> None:
    workers[1]["whole"] = False
    raise ValueError("no weights for a layer")


def made(llm: LLM) -> Any:
    """A host that serves OLD as version 1."""
    from mrl.engines.vllm.process.host import Host

    host = Host.__new__(Host)
    host.llm, host.held, host.broken, host.lora = llm, OLD, None, None
    host.loading, host.paused, host.asleep = asyncio.Lock(), False, False
    return host


@pytest.mark.parametrize(
    ("update", "serves"), [(refused, True), (refused_by_one, False), (broken_off, False)], ids=lambda x: str(x)[:24]
)
async def test_after_an_update_that_failed_it_serves_only_the_weights_it_had(
    update: Callable[[list[dict[str, Any]]], None], serves: bool
) -> None:
    host = made(LLM(update))
    with pytest.raises(ValueError, match=r"checksum|folder|layer"):
        await host.load("/weights/2", 2, None)
    assert (host.broken is None) == serves
    host.llm.update, host.llm.workers = loaded, made(LLM(loaded)).llm.workers
    assert await host.load("/weights/3", 3, None) == NEW
    assert host.broken is None
    assert host.held == NEW


async def test_what_lacked_weights_before_still_does() -> None:
    host = made(LLM(refused))
    host.broken = "they were dropped"
    with pytest.raises(ValueError, match="checksum"):
        await host.load("/weights/2", 2, None)
    assert host.broken == "they were dropped"


@pytest.mark.parametrize("method", ["load", "load_adapter"])
async def test_an_update_that_is_given_up_leaves_no_weights_to_serve(method: str, tmp_path: Path) -> None:
    """Nobody knows how far it came: it goes on within vLLM."""
    write_file(tmp_path / "adapter_model.safetensors", {"lora_A": torch.zeros(2)}, None)
    host = made(LLM(loaded))
    host.llm.hangs = True
    update = asyncio.create_task(getattr(host, method)(str(tmp_path), 2, None))
    await host.llm.entered.wait()
    update.cancel()
    with pytest.raises(asyncio.CancelledError):
        await update
    assert "version 2" in host.broken
    host.llm.hangs = False
    await getattr(host, method)(str(tmp_path), 3, None)
    assert (host.broken, host.llm.version) == (None, "3")


@pytest.mark.parametrize("method", ["load", "load_adapter"])
async def test_requests_that_come_during_an_update_are_not_refused(method: str, tmp_path: Path) -> None:
    write_file(tmp_path / "adapter_model.safetensors", {"lora_A": torch.zeros(2)}, None)
    host = made(LLM(loaded))
    update = asyncio.create_task(getattr(host, method)(str(tmp_path), 2, None))
    await host.llm.entered.wait()
    host._refuse_broken()
    await update
    host._refuse_broken()
