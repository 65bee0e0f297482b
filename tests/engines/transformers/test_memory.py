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
from mrl.engines.transformers.model import CausalLM
from mrl.models import load_model
from mrl.types import Completion, GenerateRequest, SamplingParams
from mrl.workers.rollout import RolloutWorker
from tests.engines.small_models import build, generate, prompts_of, requests_for
from tests.engines.transformers.test_static_step import Traces


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_grown_cache_is_finite_where_nothing_was_written_and_aligned_as_torchs_tensors(dtype: torch.dtype) -> None:
    for rows in (1, 3, 7):
        source, layer = GrowingLayer(), GrowingLayer()
        states = torch.ones(rows, 2, 5, 4, dtype=dtype)
        source.update(states, states)
        layer.put(torch.arange(rows), rows + 2, source, None, 3, room=40)
        for buffer in layer._buffers:
            assert buffer.dtype == dtype
            assert buffer.data_ptr() % 64 == 0
            assert buffer.sum() == rows * 2 * 3 * 4


def assert_alike(found: list[Completion], expected: list[Completion]) -> None:
    """Up to what bfloat16 rounds otherwise in other kernels."""
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=5e-3)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_recordings_of_a_model_of_its_own_outlive_calls_and_new_weights(
    dtype: str, tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second call records nothing, and the same recordings compute with weights that came since, and after weights
    that were not finite. The head is tied, so that under autocast a copy of it is refreshed for them."""
    traces = Traces()
    monkeypatch.setattr(CausalLM, "new_recorder", lambda self: traces)
    settings = {"model": tiny_model, "device": "cpu", "dtype": dtype, "max_model_len": 64}
    config = ModelConfig(**settings, decode_step="static")
    engine, eager = (
        TransformersEngine.create(config.model_copy(update={"decode_step": step})) for step in ("static", "eager")
    )
    first = generate(engine, requests())
    recorded, replays = len(traces.graphs), traces.replays
    assert recorded > 0
    assert_alike(generate(engine, requests()), first)
    assert len(traces.graphs) == recorded
    assert traces.replays > replays

    actor = ActorWorker(settings | {"dtype": "float32"}, {"learning_rate": 0.01}, 10)
    actor.initialize()
    for version, factor in ((1, float("nan")), (2, 1.5)):
        model = load_model(config)
        with torch.no_grad():
            for (name, mine), given in zip(actor.model.named_parameters(), model.parameters(), strict=True):
                mine.copy_(given * (factor if "proj" in name or "embed" in name else 1.0))
        ref = actor.write_weights(str(tmp_path), version)
        for one in (engine, eager):
            one.load_weights(ref)
        found = generate(engine, requests())
        assert all((completion.finish_reason == "error") == (version == 1) for completion in found)
    assert_alike(found, generate(eager, requests()))
    assert [c.token_ids for c in found] != [c.token_ids for c in first]
    assert len(traces.graphs) == recorded


@pytest.mark.slow
def test_recordings_of_a_shared_module_end_with_the_call(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    traces = Traces()
    monkeypatch.setattr(CausalLM, "new_recorder", lambda self: traces)
    config = ModelConfig(model=tiny_model, device="cpu", max_model_len=64, decode_step="static")
    engine = TransformersEngine.create(config, load_model(config))
    generate(engine, requests())
    recorded = len(traces.graphs)
    generate(engine, requests())
    assert len(traces.graphs) == 2 * recorded
