"""Weights that arrive while completions are being decoded, calls that join each other, calls that are given up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mrl.config import ModelConfig
from mrl.engines.transformers.engine import TransformersEngine
from mrl.errors import SyncError
from mrl.models import load_model
from mrl.types import Completion, GenerateRequest, SamplingParams, TokenSequence, WeightRef
from mrl.weights.files import publish
from tests.soak import slow_but

LENGTH = 96


@pytest.fixture(params=[True], ids=["endless"])
def engine(tiny_model: str, request: pytest.FixtureRequest) -> Iterator[TransformersEngine]:
    engine = TransformersEngine.create(config(tiny_model), endless=request.param)
    yield engine
    engine.close()


def config(model: str) -> ModelConfig:
    return ModelConfig(model=model, device="cpu", max_model_len=LENGTH)


def requests(count: int, sampling: SamplingParams, first: int = 0) -> list[GenerateRequest]:
    return [
        GenerateRequest(f"r{i}", tuple(range(65, 68 + i % 4)), sampling, seed=50 + i)
        for i in range(first, first + count)
    ]


class At:
    """Calls `then` on another thread when the model is about to run for the `n`-th time, and waits a moment for it to
    be asked for, so that the decoding sees it at its next token."""

    def __init__(self, engine: TransformersEngine, n: int, then: Any) -> None:
        self.count, self.n, self.then = 0, n, then
        self.thread: threading.Thread | None = None
        self.outcome: Any = None
        assert engine._lm is not None
        self.engine = engine
        self.handle = engine._lm.embedding.register_forward_pre_hook(self.hook)  # which every way to run it calls

    def hook(self, *_: Any) -> None:
        self.count += 1
        if self.count == self.n and self.thread is None:
            self.thread = threading.Thread(target=self.run)
            self.thread.start()
            while not self.engine._thread._urgent and self.thread.is_alive():
                pass

    def run(self) -> None:
        self.outcome = self.then()

    def end(self) -> Any:
        self.handle.remove()
        assert self.thread is not None
        self.thread.join()
        return self.outcome


def weights(model: str, folder: Path, version: int, scale: float) -> WeightRef:
    module = load_model(config(model))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(scale)
    return publish(module.state_dict(), folder, version)


def same(left: list[Completion], right: list[Completion]) -> None:
    for a, b in zip(left, right, strict=True):
        assert a.token_ids == b.token_ids
        assert a.finish_reason == b.finish_reason
        torch.testing.assert_close(torch.tensor(a.logprobs), torch.tensor(b.logprobs), atol=1e-5, rtol=0)


@pytest.mark.parametrize("max_rows", [None, 3])
@pytest.mark.parametrize(
    "sampling",
    slow_but(
        [SamplingParams(max_tokens=24, stop=("AB", "z"))],
        [SamplingParams(max_tokens=24), SamplingParams(max_tokens=24, stop=("AB", "z"))],
    ),
)
async def test_the_same_weights_again_change_nothing(
    tiny_model: str, tmp_path: Path, sampling: SamplingParams, max_rows: int | None
) -> None:
    engine = TransformersEngine.create(
        config(tiny_model).model_copy(update={"max_decode_rows": max_rows}), endless=True
    )
    asked = requests(9, sampling)
    whole = await engine.generate(asked)
    ref = weights(tiny_model, tmp_path, 1, 1.0)
    for at in (1, 2, 7):
        update = At(engine, at, lambda: engine.load_weights(ref))
        found = await engine.generate(asked)
        assert update.end() == 1
        same(found, whole)
    engine.close()


async def test_each_token_carries_the_version_that_sampled_it(
    engine: TransformersEngine, tiny_model: str, tmp_path: Path
) -> None:
    """The tokens after an update are those that the new weights give to what was there before, at their logprobs."""
    ref = weights(tiny_model, tmp_path, 7, 1.5)
    update = At(engine, 6, lambda: engine.load_weights(ref))
    asked = requests(5, SamplingParams(max_tokens=20))
    found = await engine.generate(asked)
    assert update.end() == 7
    old, new = TransformersEngine.create(config(tiny_model)), TransformersEngine.create(config(tiny_model))
    new.load_weights(ref)
    mixed = 0
    for request, completion in zip(asked, found, strict=True):
        versions = completion.policy_version
        if isinstance(versions, int):
            versions = [versions] * len(completion.token_ids)
        assert len(versions) == len(completion.token_ids)
        assert versions == sorted(versions)
        mixed += len(set(versions)) == 2
        sequence = TokenSequence(request.prompt_ids, tuple(completion.token_ids))
        by_version = {0: (await old.logprobs([sequence]))[0], 7: (await new.logprobs([sequence]))[0]}
        expected = [by_version[version][i] for i, version in enumerate(versions)]
        torch.testing.assert_close(torch.tensor(completion.logprobs), torch.tensor(expected), atol=1e-5, rtol=0)
    assert mixed, "no completion was being decoded when the weights came"


async def test_a_refused_update_leaves_the_decoding_as_it_was(
    engine: TransformersEngine, tiny_model: str, tmp_path: Path
) -> None:
    asked = requests(4, SamplingParams(max_tokens=16))
    whole = await engine.generate(asked)

    def refused() -> str:
        with pytest.raises(SyncError) as caught:
            engine.load_weights(WeightRef(3, path=str(tmp_path / "nowhere")))
        return str(caught.value)

    update = At(engine, 4, refused)
    found = await engine.generate(asked)
    assert "nowhere" in update.end()
    same(found, whole)
    assert {c.policy_version for c in found} == {0}


@pytest.mark.parametrize("engine", [True, False], indirect=True, ids=["endless", "by turns"])
async def test_calls_join_those_that_run(engine: TransformersEngine) -> None:
    """A short call that comes later ends before the long one it joined, and both get what they get alone."""
    long, short = requests(3, SamplingParams(max_tokens=60)), requests(3, SamplingParams(max_tokens=3), first=10)
    alone = [await engine.generate(long), await engine.generate(short)]
    ended: list[str] = []

    async def ask(name: str, asked: list[GenerateRequest]) -> list[Completion]:
        completions = await engine.generate(asked)
        ended.append(name)
        return completions

    first = asyncio.create_task(ask("long", long))
    await asyncio.sleep(0.01)
    together = await asyncio.gather(first, ask("short", short))
    for found, expected in zip(together, alone, strict=True):
        same(found, expected)
    assert ended == ["short", "long"]


async def test_calls_of_one_turn_begin_together_in_one_order(engine: TransformersEngine) -> None:
    """Which rows decode side by side decides the last bits, so they are the same however the calls are dealt."""
    asked = requests(8, SamplingParams(max_tokens=20))
    seen: list[list[str]] = []
    decode = engine._thread._decode

    def watched(jobs: list[Any], calls: Any) -> list[Any]:
        seen.append([job.request.id for job in jobs])
        return decode(jobs, calls)

    engine._thread._decode = watched
    for order in (asked, asked[::-1], asked[4:] + asked[:4]):
        answers = await asyncio.gather(*(engine.generate([request]) for request in order))
        assert [answer.request_id for (answer,) in answers] == [request.id for request in order]
    assert seen == [[request.id for request in asked]] * 3


async def test_a_call_that_is_given_up_leaves_the_others(engine: TransformersEngine) -> None:
    kept, dropped = requests(3, SamplingParams(max_tokens=40)), requests(3, SamplingParams(max_tokens=80), first=10)
    alone = await engine.generate(kept)
    tasks = [asyncio.create_task(engine.generate(asked)) for asked in (kept, dropped)]
    await asyncio.sleep(0.02)
    tasks[1].cancel()
    same(await tasks[0], alone)
    with pytest.raises(asyncio.CancelledError):
        await tasks[1]


async def test_a_request_that_cannot_be_served_fails_alone(engine: TransformersEngine) -> None:
    good, bad = requests(2, SamplingParams(max_tokens=30)), [GenerateRequest("x", (), SamplingParams(), seed=0)]
    served, refused = await asyncio.gather(engine.generate(good), engine.generate(bad))
    assert [completion.finish_reason for completion in served] == ["length"] * 2
    assert refused[0].finish_reason == "error"
    assert "'x'" in (refused[0].error or "")
