"""The `transformers` engine: a module it is given, and calls beside each other."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

from mrl.config import ModelConfig
from mrl.engines.transformers.engine import TransformersEngine
from mrl.errors import EngineError, SyncError
from mrl.types import SamplingParams, TokenSequence, WeightRef
from tests.engines.small_models import (
    InputShapes,
    build,
    fresh_logprobs,
    generate,
    greedy_reference,
    prompts_of,
    requests_for,
)

# --- the module it was given ------------------------------------------------------------------------------------------


def test_a_shared_module_needs_no_sync_and_is_left_as_it_was():
    model = build("qwen2")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    model.model.layers[0].eval()  # a part its owner froze stays so
    model.model.layers[1].mlp.gate_proj.weight.grad = torch.ones_like(model.model.layers[1].mlp.gate_proj.weight)
    flags = [m.training for m in model.modules()]
    engine = TransformersEngine(model, None, max_model_len=128)
    requests = requests_for(prompts_of([7, 9]), SamplingParams(temperature=0, max_tokens=12))
    before = generate(engine, requests)
    assert [m.training for m in model.modules()] == flags
    assert model.is_gradient_checkpointing
    assert model.config._attn_implementation == "mrl"  # which attends as `sdpa` does, and stays
    assert "attn_implementation" not in model.config.to_json_string()
    assert model.model.layers[1].mlp.gate_proj.weight.grad.eq(1).all()
    loss = model(torch.tensor([requests[0].prompt_ids]), labels=torch.tensor([requests[0].prompt_ids])).loss
    loss.backward()

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    assert engine.load_weights(WeightRef(4, module=model)) == 4
    after = generate(engine, requests)
    assert after[0].token_ids == greedy_reference(model.eval(), requests[0].prompt_ids, 12)
    assert after[0].token_ids != before[0].token_ids
    assert (before[0].policy_version, after[0].policy_version) == (0, 4)


def test_a_module_with_a_lora_adapter_is_sampled_with_it():
    from peft import LoraConfig, get_peft_model

    base = build("llama")
    prompt = prompts_of([9])[0]
    greedy = requests_for([prompt], SamplingParams(temperature=0, max_tokens=12))
    engine = TransformersEngine(base, None, max_model_len=128)
    without = generate(engine, greedy)[0].token_ids
    adapted = get_peft_model(base, LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj", "up_proj"]))
    engine.load_weights(WeightRef(1, module=adapted))
    got = generate(engine, greedy)[0].token_ids
    assert got == greedy_reference(adapted.eval(), prompt, 12)
    assert got != without
    with pytest.raises(EngineError, match="PEFT"):
        engine.state_dict()


def test_autocast_is_applied(qwen):
    engine = TransformersEngine(qwen, None, max_model_len=128, autocast_dtype=torch.bfloat16)
    requests = requests_for(prompts_of([6, 10]), SamplingParams(max_tokens=10), copies=2)
    for request, completion in zip(requests, generate(engine, requests), strict=True):
        exact = fresh_logprobs(qwen, TokenSequence(request.prompt_ids, tuple(completion.token_ids)))
        assert completion.logprobs == pytest.approx(exact, abs=0.5)
        assert completion.logprobs != pytest.approx(exact, abs=1e-5)


# --- calls beside each other ------------------------------------------------------------------------------------------


async def test_calls_queue_up(engine):
    requests = requests_for(prompts_of([4, 6]), SamplingParams(max_tokens=8))
    together = await asyncio.gather(
        *(engine.generate([r]) for r in requests), engine.logprobs([TokenSequence((1,), (2,))])
    )
    assert [c[0].token_ids for c in together[:2]] == [c.token_ids for c in await engine.generate(requests)]


async def test_a_cancelled_call_stops_the_loop_and_frees_the_engine(engine, qwen):
    started = threading.Event()
    handle = qwen.register_forward_hook(lambda *_: started.set())
    task = asyncio.create_task(
        engine.generate(requests_for(prompts_of([4]), SamplingParams(max_tokens=120), copies=40))
    )
    await asyncio.to_thread(started.wait, 10)
    handle.remove()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(await engine.generate(requests_for(prompts_of([3]), SamplingParams(max_tokens=1)))) == 1


async def test_a_closed_engine_says_so(qwen):
    engine = TransformersEngine(qwen, None, max_model_len=128)
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        await engine.generate([])
    with pytest.raises(SyncError, match="closed"):
        engine.load_weights(WeightRef(1, module=qwen))


async def test_closing_ends_a_running_call(qwen):
    engine = TransformersEngine(qwen, None, max_model_len=128)
    started = threading.Event()
    handle = qwen.register_forward_hook(lambda *_: started.set())
    task = asyncio.create_task(engine.generate(requests_for(prompts_of([4]), SamplingParams(max_tokens=120), 40)))
    await asyncio.to_thread(started.wait, 10)
    handle.remove()
    await asyncio.to_thread(engine.close)
    with pytest.raises(EngineError, match="closed"):
        await task


def test_rows_come_from_the_configuration(tiny_model):
    engine = TransformersEngine.create(ModelConfig(model=tiny_model, max_model_len=32, max_decode_rows=3))
    with InputShapes(engine._lm.inner) as shapes:
        generate(engine, requests_for(prompts_of([4]), SamplingParams(max_tokens=3), copies=7))
    assert max(rows for rows, _ in shapes.seen) == 3
