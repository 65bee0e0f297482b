"""Conversations over two workers with the real vLLM: each stays where its prefix is, and computes what is new only."""

from __future__ import annotations

import asyncio

import pytest

from mrl.backends.base import WorkerHandle
from mrl.backends.inline import InlineHandle
from mrl.config import ModelConfig
from mrl.engines.vllm.engine import VLLMEngine
from mrl.types import GenerateRequest, SamplingParams
from mrl.workers.pool import RolloutPool
from mrl.workers.rollout import RolloutWorker

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

BLOCK = 32
"""Of `running_vllm`: vLLM keeps whole blocks."""


async def test_a_later_turn_computes_only_what_is_new(
    running_vllm: VLLMEngine, vllm_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelConfig(model=vllm_model, device="cpu", max_model_len=256)
    second = VLLMEngine.create(config, vllm_args={"block_size": BLOCK}, vllm_kv_cache_gb=0.25)
    served: dict[str, list[VLLMEngine]] = {}
    generate = VLLMEngine.generate

    async def noted(engine: VLLMEngine, requests: list[GenerateRequest]) -> list[object]:
        for request in requests:
            assert request.session is not None
            served.setdefault(request.session, []).append(engine)
        return list(await generate(engine, requests))

    monkeypatch.setattr(VLLMEngine, "generate", noted)
    handles: list[WorkerHandle] = []
    for number, engine in enumerate((running_vllm, second)):
        worker = RolloutWorker("vllm", {"model": vllm_model})
        worker.engine = engine
        handles.append(InlineHandle(worker, f"rollout-{number}", 120))
    policy = RolloutPool(handles, max_model_len=256)
    await policy.ask_capacity()

    async def converse(number: int) -> None:
        ids, known = [65 + (number + 7 * i) % 60 for i in range(70 + number)], 0
        for turn in range(3):
            sampling = SamplingParams(max_tokens=9 + number, temperature=1.0)
            asked = GenerateRequest(f"{number}/{turn}", tuple(ids), sampling, turn, session=f"c{number}")
            completion = await policy.generate(asked)
            assert completion.prefilled == len(ids) - known // BLOCK * BLOCK
            known = len(ids) + len(completion.token_ids) - 1  # the last token is sampled, and not computed
            ids += [*completion.token_ids, *(70 + (turn + i) % 20 for i in range(12))]
            await asyncio.sleep(0.01 * (number % 3))

    try:
        await asyncio.gather(*(converse(number) for number in range(6)))
    finally:
        second.close()
    assert all(len(set(engines)) == 1 for engines in served.values()), "each conversation stays with one worker"
    assert {id(engines[0]) for engines in served.values()} == {id(running_vllm), id(second)}, "both have some"
    assert policy.prefill_metrics()["rollout/prefill_saved_fraction"] > 0.5
