"""What the engine keeps in memory: narrow matrices with the numbers of wide ones, and a cache that grows piecemeal."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from torch import nn

from mrl.actor.worker import ActorWorker
from mrl.config import ModelConfig
from mrl.engines.transformers.engine import TransformersEngine
from mrl.engines.transformers.kv_cache import GrowingCache, GrowingLayer
from mrl.models import load_model
from mrl.types import Completion, GenerateRequest, SamplingParams
from mrl.workers.rollout import RolloutWorker
from tests.engines.small_models import build, generate, prompts_of, requests_for


def requests(count: int = 6) -> list[GenerateRequest]:
    return [GenerateRequest(str(n), (65 + n, 66, 67), SamplingParams(max_tokens=12), n) for n in range(count)]


@pytest.mark.parametrize("fixture", ["tiny_model", "untied_model", "experts_model"])
def test_a_sampler_in_bfloat16_holds_its_matrices_so_and_gives_autocasts_numbers(
    fixture: str, request: pytest.FixtureRequest
) -> None:
    """To the last bit: those matrices would be rounded at each use."""
    config = ModelConfig(
        model=request.getfixturevalue(fixture), device="cpu", dtype="bfloat16", max_model_len=64, decode_step="eager"
    )
    own, shared = TransformersEngine.create(config), TransformersEngine.create(config, load_model(config))
    assert generate(own, requests()) == generate(shared, requests())
    inner = own._model.inner
    tied = inner.config.tie_word_embeddings
    for name, module in inner.named_modules():
        if type(module) is nn.Linear:
            assert module.weight.dtype == (torch.float32 if tied and name == "lm_head" else torch.bfloat16)
    assert inner.get_input_embeddings().weight.dtype == torch.float32
    bytes_held = [sum(p.nbytes for p in engine._model.inner.parameters()) for engine in (own, shared)]
    assert bytes_held[0] < 0.9 * bytes_held[1]


@pytest.mark.parametrize("fixture", ["tiny_model", "experts_model"])
def test_it_confirms_the_weights_it_rounds(
    fixture: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers with the checksum of what was sent only if it holds that, rounded."""
    settings = {"model": request.getfixturevalue(fixture), "device": "cpu", "dtype": "bfloat16", "max_model_len": 64}
    actor = ActorWorker(settings, {"learning_rate": 0.01}, 10)
    actor.initialize()
    with torch.no_grad():
        for parameter in actor.parameters:
            parameter.mul_(1.01)
    worker = RolloutWorker("transformers", settings)
    ref = actor.write_weights(str(tmp_path), 1)
    assert worker.update_weights(ref) == {"version": 1, "checksum": ref.checksum}
    assert isinstance(worker.engine, TransformersEngine)
    layer = next(m for m in worker.engine._model.inner.modules() if type(m) is nn.Linear)
    assert layer.weight.dtype == torch.bfloat16
    with torch.no_grad():
        layer.weight[0, 0] += 1
    assert worker._checksum(ref) != ref.checksum
    worker.close()


def test_keys_and_values_are_kept_in_the_dtype_they_are_multiplied_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the completions are those of keys that are rounded at each use."""
    model = build("llama")
    asked = requests_for(prompts_of([9, 4]), SamplingParams(max_tokens=20), copies=3)

    def completions() -> tuple[list[Completion], set[torch.dtype]]:
        seen: set[torch.dtype] = set()
        update = GrowingLayer.update

        def watched(self: GrowingLayer, *states: torch.Tensor, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
            found = update(self, *states, **options)
            seen.update(part.dtype for part in found)
            return found

        with monkeypatch.context() as patch:
            patch.setattr(GrowingLayer, "update", watched)
            engine = TransformersEngine(model, None, max_model_len=64, autocast_dtype=torch.bfloat16)
            return asyncio.run(engine.generate(asked)), seen

    narrow, dtypes = completions()
    assert dtypes == {torch.bfloat16}
    monkeypatch.setattr("mrl.engines.transformers.kv_cache.as_multiplied", lambda *states: states)
    wide, dtypes = completions()
    assert torch.float32 in dtypes
    assert narrow == wide


def test_a_growing_cache_holds_one_layer_twice_at_most() -> None:
    model = build("qwen2")
    engine = TransformersEngine(model, None, max_model_len=128)
    with engine._model.inference():
        cache = engine._model.new_cache()
        assert isinstance(cache, GrowingCache)
        ids = torch.tensor([[5] * 40])
        engine._model.forward(ids, torch.arange(40)[None], None, cache, keep=1)
        layers = cache.growing_layers
        before = [sum(b.nbytes for b in layer._buffers) for layer in layers]
        peaks: list[int] = []
        move = GrowingLayer._move

        def watched(self: GrowingLayer, buffers: list[torch.Tensor], end: int) -> None:
            alive = [buffer for layer in layers for buffer in layer._buffers]
            peaks.append(sum(b.nbytes for b in [*alive, *buffers]))
            move(self, buffers, end)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(GrowingLayer, "_move", watched)
            engine._model.forward(ids[:, :1], torch.tensor([[40]]), None, cache, keep=1)
    after = [sum(b.nbytes for b in layer._buffers) for layer in layers]
    assert len(peaks) == len(layers)
    assert after[0] > before[0]
    assert max(peaks) <= sum(after) + before[-1]
