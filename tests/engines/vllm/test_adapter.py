"""Servers that are refused, and adapters that take each other's place on one, with a stand-in for it (the real one:
`test_vllm_remote.py`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from mrl.config import ModelConfig
from mrl.engines.vllm.remote import RemoteVLLMEngine
from mrl.errors import EngineDied, EngineError, SyncError
from mrl.types import GenerateRequest, SamplingParams, WeightRef
from mrl.weights.files import adapter_ref
from mrl.weights.tensors import write_file


class FakeServer:
    """What a `vllm serve` with adapters answers. `before_next` is done before the next completion is looked at.
    logprob: of the only token that top-k leaves."""

    def __init__(self, logprob: float = 0.0) -> None:
        self.logprob = logprob
        self.adapters: dict[str, str] = {}
        self.before_next: Any = None
        self.seeds: list[int | None] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path, body = request.url.path, json.loads(request.content or b"{}")
        if path == "/v1/models":
            rows = [{"id": "base", "root": "base"}, *({"id": n, "root": r} for n, r in self.adapters.items())]
            return httpx.Response(200, json={"data": rows})
        if path == "/v1/load_lora_adapter":
            self.adapters[body["lora_name"]] = body["lora_path"]
            return httpx.Response(200)
        if path == "/v1/unload_lora_adapter":
            del self.adapters[body["lora_name"]]
            return httpx.Response(200)
        if path == "/v1/completions":
            if self.before_next is not None:
                before_next, self.before_next = self.before_next, None
                before_next()
            self.seeds.append(body.get("seed"))
            if body["model"] not in {"base", *self.adapters}:
                return httpx.Response(404, text="no such model")
            logprobs = {"token_logprobs": [self.logprob]}
            choice = {"token_ids": [7], "logprobs": logprobs, "finish_reason": "length"}
            return httpx.Response(200, json={"choices": [choice]})
        return httpx.Response(404)


def adapter(folder: Path, version: int) -> WeightRef:
    (folder / f"v{version}").mkdir()
    write_file(folder / f"v{version}" / "adapter_model.safetensors", {"lora_A": torch.full((2,), version)}, None)
    return adapter_ref(folder / f"v{version}", version)


def put_before(monkeypatch: pytest.MonkeyPatch, server: FakeServer) -> None:
    """Every address is this server's."""
    for name in ("Client", "AsyncClient"):
        real = getattr(httpx, name)
        monkeypatch.setattr(
            httpx, name, lambda real=real, **options: real(**options, transport=httpx.MockTransport(server))
        )


def test_a_server_with_raw_logprobs_or_without_the_model_is_refused(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelConfig(model=tiny_model, device="cpu", max_model_len=64)
    with pytest.raises(EngineDied, match=r"vllm_urls: http://127\.0\.0\.1:9 does not answer"):
        RemoteVLLMEngine.create(config, url="http://127.0.0.1:9")
    with pytest.raises(EngineError, match="has no MRL_NO_SUCH_KEY"):
        RemoteVLLMEngine.create(config, url="http://a", vllm_api_key_env="MRL_NO_SUCH_KEY")
    put_before(monkeypatch, FakeServer(logprob=-5.5))
    with pytest.raises(EngineError, match="--logprobs-mode processed_logprobs"):
        RemoteVLLMEngine.create(config, url="http://a")
    with pytest.raises(EngineError, match="serves base, not 'other'"):
        RemoteVLLMEngine.create(config, url="http://a", vllm_model_name="other")


@pytest.mark.parametrize(("asked", "sent"), [(None, 9), (True, 9), (False, None)])
async def test_servers_get_seeds_unless_told_otherwise(
    asked: bool | None, sent: int | None, tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several that were started with the same seed of their own would all draw the same."""
    server = FakeServer()
    put_before(monkeypatch, server)
    config = ModelConfig(model=tiny_model, device="cpu", max_model_len=64)
    engine = RemoteVLLMEngine.create(config, url="http://a", repeatable_sampling=asked)
    await engine.generate([GenerateRequest("r", (65,), SamplingParams(max_tokens=1), seed=9)])
    assert server.seeds[-1] == sent


async def test_a_request_whose_adapter_is_replaced_runs_with_the_new_one(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = FakeServer()
    put_before(monkeypatch, server)
    engine = RemoteVLLMEngine.create(ModelConfig(model=tiny_model, device="cpu", max_model_len=64), url="http://a")

    async def versions() -> list[int | list[int]]:
        asked = GenerateRequest("r", (65,), SamplingParams(max_tokens=1), seed=0)
        return [completion.policy_version for completion in await engine.generate([asked])]

    def copies() -> list[str]:
        return [path.name.split("-")[-2] for path in tmp_path.glob("mrl-*")]

    assert await versions() == [0]
    engine.load_weights(adapter(tmp_path, 1))
    assert await versions() == [1]
    server.before_next = lambda: engine.load_weights(adapter(tmp_path, 2))
    assert await versions() == [2], "the server knew the first one no more"
    assert copies() == ["v2"]
    server.before_next = server.adapters.clear
    asked = GenerateRequest("r", (65,), SamplingParams(max_tokens=1), seed=0)
    (refused,) = await engine.generate([asked])
    assert refused.finish_reason == "error"
    assert "no such model" in (refused.error or "")
    monkeypatch.setattr(server, "adapters", _Forgetful())
    with pytest.raises(SyncError, match="does not list the adapter"):
        engine.load_weights(adapter(tmp_path, 3))
    assert copies() == ["v2"], "one that was not loaded leaves no copy"


class _Forgetful(dict[str, str]):
    def __setitem__(self, name: str, path: str) -> None:
        """Nothing is kept."""
