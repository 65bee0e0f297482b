"""Sleeping, with a stand-in for vLLM: no CPU can sleep. What the host says and does around it is the real thing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mrl.errors import EngineError
from mrl.types import GenerateRequest, SamplingParams, WeightRef
from mrl.weights.tensors import write_file

pytestmark = pytest.mark.vllm


class FakeLLM:
    """Stands for vLLM's AsyncLLM on a GPU: after level 2 it has memory again and no `weights` in it. calls: what was
    done to its memory and weights, in order. fails: a call that raises."""

    def __init__(self, *, lora: bool = False, fails: str | None = None) -> None:
        self.model_config = SimpleNamespace(enable_sleep_mode=True)
        self.vllm_config = SimpleNamespace(lora_config=object() if lora else None)
        self.weights: str | None = "3"
        self.unmapped: set[str] = set()
        self.calls: list[str] = []
        self.fails = fails

    def call(self, what: str) -> None:
        if what == self.fails:
            raise RuntimeError(f"{what} fails")
        self.calls.append(what)

    @property
    def asleep(self) -> bool:
        return bool(self.unmapped)

    async def sleep(self, level: int, mode: str) -> None:
        assert mode == "wait", "what is in flight would come back cut off, and be trained on"
        self.call(f"sleep {level}")
        self.unmapped = {"weights", "kv_cache"}
        self.weights = None if level == 2 else self.weights

    async def wake_up(self, tags: list[str] | None = None) -> None:
        self.call(f"wake {tags or 'all'}")
        self.unmapped -= set(tags or self.unmapped)

    async def start_weight_update(self) -> None:
        assert "weights" not in self.unmapped, "written to memory that is not there"

    async def update_weights(self, request: Any) -> None:
        self.call("update")

    async def finish_weight_update(self, version: str) -> None:
        self.weights = version

    async def add_lora(self, request: Any) -> bool:
        assert "weights" not in self.unmapped, "written to memory that is not there"
        self.call("adapter")
        return True

    async def update_weight_version(self, version: str) -> None:
        self.weights = version

    async def collective_rpc(self, method: str) -> list[dict[str, Any]]:
        return [{"checksum": "sum", "whole": True, "seconds": 0.0}]

    async def pause_generation(self, mode: str, clear_cache: bool) -> None:
        """Nothing runs."""

    async def resume_generation(self) -> None:
        assert not self.asleep, "goes on with memory that is not there"

    async def generate(self, *args: Any, **kwargs: Any) -> AsyncIterator[SimpleNamespace]:
        assert self.weights is not None, "generates from no weights"
        assert not self.asleep, "generates without memory"
        spans = [SimpleNamespace(version=self.weights, start=0)]
        output = SimpleNamespace(token_ids=[7], logprobs=None, finish_reason="length", weight_versions=spans)
        yield SimpleNamespace(outputs=[output], num_cached_tokens=0)

    async def check_health(self) -> None:
        """It is well."""

    async def get_weight_version(self) -> str:
        return "3" if self.weights is None else self.weights

    async def is_paused(self) -> bool:
        return self.asleep

    def get_num_unfinished_requests(self) -> int:
        return 0


def host(llm: FakeLLM) -> Any:
    from mrl.engines.vllm.process.host import Host

    made = Host.__new__(Host)
    made.llm, made.lora, made.broken, made.loading = llm, None, None, asyncio.Lock()
    made.paused = made.asleep = False
    made.prompt_tokens = made.cached_tokens = 0
    made.load_seconds, made.held = 0.0, None
    return made


REQUEST = {"id": "r", "prompt_ids": [1], "seed": 0, "sampling": {"temperature": 1.0, "max_tokens": 1}}


async def test_after_level_2_nothing_is_served_before_weights_came(tmp_path: Path) -> None:
    from mrl.engines.vllm.process.host import Refused

    asleep = host(FakeLLM())
    assert (await asleep.generate(REQUEST))["versions"] == [[3, 0]]
    await asleep.sleep(2)
    for work in (asleep.resume(), asleep.sleep(1)):
        with pytest.raises(Refused, match=r"asleep.* wake it first"):
            await work
    for _ in ("asleep", "awake"):
        with pytest.raises(Refused, match=r"no whole weights: .*level 2; load weights first"):
            await asleep.generate(REQUEST)
        with pytest.raises(Refused, match="load weights first"):
            await asleep.score([1], [2], 1.0)
        assert (await asleep.health())["version"] is None
        await asleep.wake()
    assert await asleep.load(str(tmp_path), 4, None) == "sum"
    assert (await asleep.generate(REQUEST))["versions"] == [[4, 0]]
    assert (await asleep.health())["version"] == 4


@pytest.mark.parametrize("level", [1, 2])
async def test_weights_wake_it_and_the_cache_comes_after_them(level: int, tmp_path: Path) -> None:
    llm = FakeLLM()
    sleeper = host(llm)
    await sleeper.sleep(level)
    assert await sleeper.load(str(tmp_path), 4, None) == "sum"
    assert llm.calls == [f"sleep {level}", "wake ['weights']", "update", "wake ['kv_cache']"]
    assert (await sleeper.generate(REQUEST))["versions"] == [[4, 0]]
    await sleeper.sleep(2)
    assert await sleeper.load(str(tmp_path), 5, None) == "sum"
    assert (await sleeper.health())["version"] == 5


async def test_an_adapter_wakes_it_too(tmp_path: Path) -> None:
    write_file(tmp_path / "adapter_model.safetensors", {"lora_A": torch.ones(2, 2)}, None)
    llm = FakeLLM(lora=True)
    sleeper = host(llm)
    await sleeper.sleep(1)
    await sleeper.load_adapter(str(tmp_path), 4, None)
    assert llm.calls == ["sleep 1", "wake ['weights']", "adapter", "wake ['kv_cache']"]
    assert (await sleeper.generate(REQUEST))["versions"] == [[4, 0]]


@pytest.mark.parametrize("fails", ["wake ['weights']", "update", "wake ['kv_cache']"])
async def test_what_fails_on_the_way_leaves_it_asleep(fails: str, tmp_path: Path) -> None:
    """Nothing is served, and another try brings it back."""
    from mrl.engines.vllm.process.host import Refused

    llm = FakeLLM(fails=fails)
    sleeper = host(llm)
    await sleeper.sleep(2)
    with pytest.raises(RuntimeError, match="fails"):
        await sleeper.load(str(tmp_path), 4, None)
    assert (await sleeper.health())["asleep"]
    with pytest.raises(Refused, match=r"asleep|no whole weights"):
        await sleeper.generate(REQUEST)
    llm.fails = None
    await sleeper.load(str(tmp_path), 5, None)
    assert (await sleeper.generate(REQUEST))["versions"] == [[5, 0]]


async def test_asleep_with_its_weights_it_refuses_at_once() -> None:
    """vLLM itself would let the request wait for ever."""
    from mrl.engines.vllm.process.host import Refused

    sleeper = host(FakeLLM())
    await sleeper.sleep(1)
    for work in (sleeper.generate(REQUEST), sleeper.score([1], [2], 1.0)):
        with pytest.raises(Refused, match="asleep"):
            await work


async def test_the_engine_and_its_worker_report_no_version_meanwhile(tmp_path: Path) -> None:
    from mrl.engines.vllm.engine import VLLMEngine
    from mrl.workers.rollout import RolloutWorker

    class FakeProcess:
        """The host in this very process."""

        made = host(FakeLLM())

        def submit(self, method: str, *args: Any) -> Future[Any]:
            return asyncio.run_coroutine_threadsafe(getattr(self.made, method)(*args), asyncio.get_running_loop())

        def call(self, method: str, *args: Any, timeout: float) -> Any:
            return asyncio.run(getattr(self.made, method)(*args))

    engine = VLLMEngine.__new__(VLLMEngine)
    engine._process, engine._sync_seconds, engine.version = FakeProcess(), 1.0, 3  # type: ignore[assignment]
    engine._repeatable = True
    engine._max_model_len, engine._vocab_size, engine._end_ids = 8, 9, frozenset()
    worker = RolloutWorker("vllm", {"model": "not looked for"})
    worker.engine = engine
    asked = [GenerateRequest("r", (1,), SamplingParams(max_tokens=1), seed=0)]
    assert (await worker.generate(asked))[0].policy_version == 3
    await worker.sleep(2)
    assert engine.version is None
    assert engine.held() is None
    await worker.wake()
    assert (await worker.health())["version"] is None
    with pytest.raises(EngineError, match="load weights first"):
        await worker.generate(asked)
    ref = WeightRef(4, path=str(tmp_path), checksum="sum")
    assert await asyncio.to_thread(worker.update_weights, ref) == {"version": 4, "checksum": "sum"}
    assert (await worker.generate(asked))[0].policy_version == 4
    assert (await worker.health())["version"] == 4


async def test_level_1_keeps_the_weights_and_an_adapters_base_is_not_dropped() -> None:
    from mrl.engines.vllm.process.host import Refused

    for lora in (False, True):
        sleeper = host(FakeLLM(lora=lora))
        await sleeper.sleep(1)
        assert (await sleeper.health())["version"] == 3
        await sleeper.wake()
        assert (await sleeper.generate(REQUEST))["versions"] == [[3, 0]]
    with pytest.raises(Refused, match="level 1, or use lora_sync: merged"):
        await sleeper.sleep(2)
    with pytest.raises(Refused, match="levels 1 and 2, found 3"):
        await sleeper.sleep(3)
    assert not sleeper.llm.asleep
