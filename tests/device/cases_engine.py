"""The `transformers` engine on a simulated accelerator: the CPU's completions, and few waits. Run by
tests/test_simulated_device.py."""

from __future__ import annotations

import asyncio
import gc
import time
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from transformers import AutoTokenizer

from mrl.engines.transformers import decode_calls
from mrl.engines.transformers.decode import STEPS_PER_CHECK
from mrl.engines.transformers.engine import TransformersEngine
from mrl.system import memory
from mrl.types import Completion, GenerateRequest, SamplingParams, TokenSequence
from tests import simulated_device
from tests.device.cases_actor import make_actor
from tests.engines.small_models import VOCAB, assert_same, build, prompts_of

CUT = SamplingParams(max_tokens=30, temperature=0.8, top_p=0.9, top_k=20, min_p=0.01, stop_token_ids=(3, 17))


def engine_on(device: str, architecture: str, tokenizer: Any = None, **options: Any) -> TransformersEngine:
    return TransformersEngine(build(architecture).to(device), tokenizer, max_model_len=128, **options)


def requests(sampling: SamplingParams, copies: int = 2) -> list[GenerateRequest]:
    """Prompts with one beginning and ragged ends, some of them shared, and completions of different lengths."""
    beginning = prompts_of([20])[0]
    prompts = [beginning + prompt for prompt in prompts_of([3, 17, 9, 1])]
    return [
        GenerateRequest(f"{p}.{c}", prompt, SamplingParams(**{**vars_of(sampling), "max_tokens": 5 + 7 * c + p}), p + c)
        for p, prompt in enumerate(prompts)
        for c in range(copies)
    ]


def vars_of(sampling: SamplingParams) -> dict[str, Any]:
    return {name: getattr(sampling, name) for name in sampling.__slots__}


def generate(engine: TransformersEngine, asked: list[GenerateRequest]) -> list[Completion]:
    return asyncio.run(engine.generate(asked))


@pytest.mark.parametrize("architecture", ["qwen2", "gemma3", "gpt2", "lfm2"])
def test_completions_are_those_of_the_cpu(architecture: str) -> None:
    """Whole rows and refilled ones, with every filter, and with none; by each way of taking a step that it has."""
    for sampling, limits in ((CUT, {"max_rows": 4}), (SamplingParams(), {})):
        asked = requests(sampling)
        expected = generate(engine_on("cpu", architecture, decode_step="eager", **limits), asked)
        for step in ("eager",) if architecture in ("gpt2", "lfm2") else ("eager", "static"):
            assert_same(generate(engine_on("sim", architecture, decode_step=step, **limits), asked), expected)


def test_stop_strings_end_the_same_rows(tiny_model: str) -> None:
    from transformers import AutoModelForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    asked = [
        GenerateRequest(str(n), (65, 66, 67 + n), SamplingParams(max_tokens=60, stop=("a", "Z")), n) for n in range(8)
    ]
    found = []
    for device in ("cpu", "sim"):
        model = AutoModelForCausalLM.from_pretrained(tiny_model).to(device)
        found.append(generate(TransformersEngine(model, tokenizer, max_model_len=128), asked))
    assert_same(found[1], found[0])
    assert {completion.finish_reason for completion in found[0]} == {"stop", "length"}


def test_logprobs_are_those_of_the_cpu() -> None:
    sequences = [TokenSequence(p[:5], p[5:], 0.7 + n / 10) for n, p in enumerate(prompts_of([9, 30, 6, 17]))]
    values = []
    for device in ("cpu", "sim"):
        engine = engine_on(device, "qwen2")
        with simulated_device.waits() as found:
            values.append(asyncio.run(engine.logprobs(sequences)))
    assert list(chain(*values[1])) == pytest.approx(list(chain(*values[0])), abs=1e-4)
    assert found.total() <= 2, found  # one of them is transformers', to make a mask


@pytest.mark.parametrize("step", ["eager", "static"])
@pytest.mark.parametrize("sampling", [SamplingParams(), CUT], ids=["plain", "cut"])
def test_the_host_waits_once_in_several_steps(step: str, sampling: SamplingParams) -> None:
    """Whatever rows end and are refilled meanwhile."""
    engine = engine_on("sim", "qwen2", decode_step=step, max_rows=5)
    model_runs = []
    engine._model.inner.register_forward_hook(lambda *_: model_runs.append(1))
    with simulated_device.waits() as found:
        generate(engine, requests(sampling))
    assert found.total() <= 1 + len(model_runs) / STEPS_PER_CHECK["cuda"], found


def test_it_refuses_what_cuda_would() -> None:
    """The simulated device itself: both sides do not mix, and what is read too early is not there."""
    here, there = torch.randn(3, VOCAB), torch.zeros(3, VOCAB).to("sim")
    with pytest.raises(RuntimeError, match="tensors on sim"):
        there + here
    with pytest.raises(TypeError, match="numpy"):
        there.numpy()
    host = torch.ones(3, VOCAB).copy_(there, non_blocking=True)
    assert host.isnan().all()
    simulated_device.MODULE.synchronize()
    assert torch.equal(host, torch.zeros(3, VOCAB))


@pytest.mark.parametrize("step", ["eager", "static"])
@pytest.mark.parametrize("architecture", ["qwen2", "gemma3"])
def test_conversations_go_on_as_on_the_cpu(architecture: str, step: Any) -> None:
    """From the keys and values of the turn before, some of which are known from another session."""
    engines = [engine_on("cpu", architecture), engine_on("sim", architecture, decode_step=step, max_rows=3)]
    spoken = [prompts_of([n])[0] for n in (21, 34, 18, 21)]
    for turn in range(3):
        asked = [GenerateRequest(str(n), ids, CUT, 10 * n + turn, session=str(n)) for n, ids in enumerate(spoken)]
        expected, got = [generate(engine, asked) for engine in engines]
        assert_same(got, expected)
        if turn:
            assert [c.prefilled for c in got] == [1 + 3 + n for n in range(len(spoken))]
        spoken = [
            (*ids, *completion.token_ids, *range(3 + n))
            for n, (ids, completion) in enumerate(zip(spoken, got, strict=True))
        ]


def test_engines_on_one_device_share_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes half of what is left, and gives it back when it is gone."""
    monkeypatch.setattr(memory, "_claims", WeakKeyDictionary())
    monkeypatch.setattr(type(simulated_device.MODULE), "free", 4_000_000)
    engines = [engine_on("sim", "qwen2") for _ in range(2)]
    budgets = [engine._limits.max_batch_tokens * engine._model.cache_bytes_per_token for engine in engines]
    assert 1_600_000 <= budgets[0] <= 2_000_000
    assert budgets[1] <= (4_000_000 - budgets[0]) / 2
    assert [engine._prefixes.max_bytes for engine in engines] == [4_000_000 // 8, (4_000_000 - budgets[0]) // 8]
    before = memory.unclaimed(engines[1]._model.device)
    request = GenerateRequest("a", (1, 2), SamplingParams(max_tokens=2), 0, session="s")
    assert generate(engines[1], [request])[0].error is None
    assert memory.unclaimed(engines[1]._model.device) == before - engines[1]._prefixes.max_bytes, (
        "once there are sessions"
    )
    one = engines[0]._limits.max_batch_tokens
    engines.clear()
    while decode_calls._SHARED_THREAD.running:  # answered a moment before the thread lets go of the engine
        time.sleep(0.001)
    gc.collect()
    assert engine_on("sim", "qwen2")._limits.max_batch_tokens == one


def test_micro_batches_are_by_the_memory_that_is_free(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_claims", WeakKeyDictionary())
    found = []
    for free in (10_000_000, 30_000_000):
        monkeypatch.setattr(type(simulated_device.MODULE), "free", free)
        found.append([make_actor(tiny_model, "sim", **k).micro_batch_tokens for k in ({}, {"dtype": "bfloat16"})])
        assert make_actor(tiny_model, "sim", max_tokens_per_micro_batch=77).micro_batch_tokens == 77
    assert found[0][0] < found[0][1]
    assert found[0][0] < found[1][0]
