"""Engine `vllm` with the real vLLM: the numbers of transformers, in a process of its own, that can be stopped."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mrl.config import ModelConfig
from mrl.engines.transformers.engine import TransformersEngine
from mrl.engines.vllm.engine import VLLMEngine
from mrl.errors import EngineDied, EngineError, SyncError
from mrl.models import load_model
from mrl.types import GenerateRequest, SamplingParams, TokenSequence, WeightRef
from mrl.weights.files import publish
from tests.engines.vllm.processes import core_of, found, processes_of, shared_by

pytestmark = pytest.mark.vllm

LENGTH = 256
"""Of `running_vllm`."""


def config(model: str, **changes: object) -> ModelConfig:
    return ModelConfig(model=model, device="cpu", max_model_len=LENGTH, **changes)


@pytest.fixture(scope="module")
def engine(running_vllm: VLLMEngine, vllm_model: str, tmp_path_factory: pytest.TempPathFactory) -> VLLMEngine:
    model = load_model(config(vllm_model))
    running_vllm.load_weights(publish(model.state_dict(), tmp_path_factory.mktemp("weights"), 0))
    return running_vllm


@pytest.fixture(scope="module")
def reference(vllm_model: str) -> Iterator[TransformersEngine]:
    engine = TransformersEngine.create(config(vllm_model))
    yield engine
    engine.close()


def requests(count: int, params: SamplingParams, prompt: tuple[int, ...] | None = None) -> list[GenerateRequest]:
    return [GenerateRequest(f"r{i}", prompt or (65 + i % 3, 66, 67), params, seed=100 + i) for i in range(count)]


async def gap(engine: VLLMEngine, reference: TransformersEngine, params: SamplingParams) -> float:
    """The largest difference between the sampler's logprobs and the reference's of the same tokens."""
    asked = requests(12, params)
    sampled = await engine.generate(asked)
    sequences = [
        TokenSequence(r.prompt_ids, tuple(c.token_ids), params.temperature) for r, c in zip(asked, sampled, strict=True)
    ]
    scored = await reference.logprobs(sequences)
    own = await engine.logprobs(sequences)
    pairs = [
        (a, b, o)
        for c, s, w in zip(sampled, scored, own, strict=True)
        for a, b, o in zip(c.logprobs, s, w, strict=True)
    ]
    assert len(pairs) > 50
    assert max(abs(b - o) for _, b, o in pairs) < 1e-4, "its own scores of the same tokens"
    return max(abs(a - b) for a, b, _ in pairs)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
async def test_logprobs_are_those_of_transformers(
    engine: VLLMEngine, reference: TransformersEngine, temperature: float
) -> None:
    assert await gap(engine, reference, SamplingParams(temperature=temperature, max_tokens=30)) < 1e-4


async def test_filters_renormalise_and_greedy_is_certain(engine: VLLMEngine, reference: TransformersEngine) -> None:
    for params in (SamplingParams(top_p=0.5, max_tokens=4), SamplingParams(top_k=5, max_tokens=4)):
        for asked in requests(4, params):
            (mine,) = await engine.generate([asked])
            full = await reference.logprobs([TokenSequence(asked.prompt_ids, tuple(mine.token_ids))])
            assert all(a > b + 0.1 for a, b in zip(mine.logprobs, full[0], strict=True))
    greedy = SamplingParams(temperature=0.0, max_tokens=6)
    (mine,), (theirs,) = await engine.generate(requests(1, greedy)), await reference.generate(requests(1, greedy))
    assert mine.token_ids == theirs.token_ids
    assert mine.logprobs == [0.0] * 6


async def test_many_long_prompts_come_at_once(engine: VLLMEngine) -> None:
    """More prompt tokens than one step takes, each request with a seed of its own."""
    params = SamplingParams(max_tokens=4)
    asked = [GenerateRequest(str(i), tuple(65 + (i + j) % 50 for j in range(100)), params, seed=i) for i in range(160)]
    assert 160 * 100 > 8192
    done = await engine.generate(asked)
    (alone,) = await engine.generate(asked[-1:])
    assert done[-1].token_ids == alone.token_ids


async def test_tokens_derive_from_the_seed_alone(engine: VLLMEngine) -> None:
    params = SamplingParams(max_tokens=12)
    together = await engine.generate(requests(8, params))
    assert len({tuple(c.token_ids) for c in together}) == 8
    for asked, known in zip(requests(8, params), together, strict=True):
        (alone,) = await engine.generate([asked])
        assert alone.token_ids == known.token_ids


async def test_without_seeds_of_their_own_requests_draw_what_comes(
    engine: VLLMEngine, reference: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the right distribution still."""
    monkeypatch.setattr(engine, "_repeatable", False)
    asked = [GenerateRequest(f"r{i}", (65, 66, 67), SamplingParams(max_tokens=12), seed=7) for i in range(8)]
    once, again = await engine.generate(asked), await engine.generate(asked)
    assert len({tuple(c.token_ids) for c in [*once, *again]}) == 16
    assert await gap(engine, reference, SamplingParams(temperature=0.8, max_tokens=30)) < 1e-4


async def test_ends_where_it_should(engine: VLLMEngine, vllm_model: str) -> None:
    (whole,) = await engine.generate(requests(1, SamplingParams(temperature=0.0, max_tokens=20)))
    third = whole.token_ids[2]
    (cut,) = await engine.generate(requests(1, SamplingParams(temperature=0.0, max_tokens=20, stop_token_ids=(third,))))
    assert cut.finish_reason == "stop"
    assert cut.token_ids == whole.token_ids[: whole.token_ids.index(third) + 1]
    from mrl.models import load_tokenizer

    tokenizer = load_tokenizer(config(vllm_model))
    ends = {tokenizer.eos_token_id}
    stops = SamplingParams(max_tokens=60, stop=("e", "a", "t"))
    stopped = 0
    for done in await engine.generate([GenerateRequest(str(s), (65,), stops, s) for s in range(8)]):
        text = tokenizer.decode(done.token_ids, skip_special_tokens=True)
        assert not any(mark in text[:-1] for mark in stops.stop)
        if done.finish_reason == "stop" and done.token_ids[-1] not in ends:
            assert text[-1] in stops.stop, "the token that spells it is kept"
            stopped += 1
    assert stopped
    full = await engine.generate([GenerateRequest("x", tuple([65] * (LENGTH - 3)), SamplingParams(max_tokens=99), 4)])
    assert len(full[0].token_ids) <= 3
    (scores,) = await engine.logprobs([TokenSequence((65,), tuple([66] * (LENGTH - 1)))])
    assert len(scores) == LENGTH - 1


async def test_generations_of_one_prompt_share_its_prefill(engine: VLLMEngine) -> None:
    prompt = tuple(65 + i % 20 for i in range(96))  # three blocks of 32

    async def hits() -> tuple[int, int]:
        health = await engine.health()
        return health["prompt_tokens"], health["cached_prompt_tokens"]

    before = await hits()
    completions = await engine.generate(requests(8, SamplingParams(max_tokens=2), prompt))
    asked, found = (now - then for now, then in zip(await hits(), before, strict=True))
    assert asked == 8 * 96
    assert found == 7 * 64, "all but the first take the whole blocks before the last token's from the cache"
    assert sum(completion.prefilled or 0 for completion in completions) == asked - found


async def test_bad_requests_are_named(engine: VLLMEngine) -> None:
    good = SamplingParams(max_tokens=2)
    for prompt, params, message in [
        ((), good, "empty prompt"),
        ((70_000,), good, "id 70000 in its prompt"),
        (tuple([65] * LENGTH), good, "shorten the prompt or raise max_model_len"),
        ((65,), SamplingParams(top_p=0.0), "top_p=0.0"),
        ((65,), SamplingParams(temperature=-1.0), r"temperature=-1\.0"),
    ]:
        served, refused = await engine.generate([*requests(1, good), GenerateRequest("bad", prompt, params, 0)])
        assert len(served.token_ids) == 2
        assert refused.finish_reason == "error"
        assert re.search(f"'bad'.*{message}", refused.error or "")
    with pytest.raises(EngineError, match="temperature=0"):
        await engine.logprobs([TokenSequence((65,), (66,), 0.0)])
    with pytest.raises(EngineError, match="sleep"):
        await engine.sleep()
    assert len(await engine.generate(requests(2, good))) == 2


async def test_abort_gives_what_there_is(engine: VLLMEngine) -> None:
    task = asyncio.create_task(engine.generate(requests(3, SamplingParams(max_tokens=100, stop=()))))
    await in_flight(engine, 3)
    await engine.abort(["r1"])
    done = await task
    assert done[1].finish_reason == "abort"
    assert len(done[1].token_ids) == len(done[1].logprobs) < 100
    assert done[0].finish_reason != "abort"


async def in_flight(engine: VLLMEngine, count: int) -> None:
    while (await engine.health())["in_flight"] < count:
        await asyncio.sleep(0.001)


async def test_paused_requests_go_on_where_they_were(engine: VLLMEngine) -> None:
    params = SamplingParams(max_tokens=60)
    plain = await engine.generate(requests(4, params))
    task = asyncio.create_task(engine.generate(requests(4, params)))
    await in_flight(engine, 4)
    await engine.pause()
    assert (await engine.health())["paused"]
    done, _ = await asyncio.wait([task], timeout=0.3)
    assert not done
    await engine.resume()
    assert [c.token_ids for c in await task] == [c.token_ids for c in plain]


async def test_pausing_and_loading_do_not_look_like_hanging(
    engine: VLLMEngine, vllm_model: str, tmp_path: Path
) -> None:
    """For as long as they take: what the watch over it asks for says that nobody waits for a token."""

    async def working() -> int:
        return int((await engine._one("pulse"))["working"])

    running = asyncio.create_task(engine.generate(requests(16, SamplingParams(max_tokens=250))))
    await in_flight(engine, 16)
    assert await working()
    await engine.pause()
    assert (await engine.health())["in_flight"]
    assert not await working()
    await engine.resume()
    assert await working()
    ref = publish(load_model(config(vllm_model)).state_dict(), tmp_path, 0)
    core = found(core_of(engine.pid))
    os.kill(core, signal.SIGSTOP)
    update = asyncio.create_task(asyncio.to_thread(engine.load_weights, ref))
    while await working():
        await asyncio.sleep(0.01)
    done, _ = await asyncio.wait([update, running], timeout=0.5)
    assert not done
    assert not await working()
    os.kill(core, signal.SIGCONT)
    await update
    assert {c.finish_reason for c in await running} <= {"length", "stop"}


async def test_cancelling_frees_the_engine(engine: VLLMEngine) -> None:
    task = asyncio.create_task(engine.generate(requests(4, SamplingParams(max_tokens=100))))
    await in_flight(engine, 4)
    task.cancel()
    deadline = time.monotonic() + 5
    while (await engine.health())["in_flight"]:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_weights_change_under_running_requests(vllm_model: str, engine: VLLMEngine, tmp_path: Path) -> None:
    """Versions per token, and each token's logprob is that of its own version's weights."""
    model = load_model(config(vllm_model))
    old = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(7)
    new = {name: tensor + torch.randn_like(tensor) * 0.05 for name, tensor in old.items() if name != "lm_head.weight"}
    refs = [publish(new if v else old, tmp_path / str(v), v) for v in (0, 1)]
    await asyncio.to_thread(engine.load_weights, refs[0])
    asked = requests(8, SamplingParams(max_tokens=110))
    task = asyncio.create_task(engine.generate(asked))
    await in_flight(engine, 8)
    await asyncio.to_thread(engine.load_weights, refs[1])
    sampled = await task
    mixed = [c for c in sampled if isinstance(c.policy_version, list)]
    assert mixed, "no completion had begun before the update"
    scores = {}
    for version, tensors in ((0, old), (1, new)):
        model.load_state_dict(tensors, strict=False)
        scorer = TransformersEngine(model, None, max_model_len=LENGTH)
        scores[version] = await scorer.logprobs(
            [TokenSequence(r.prompt_ids, tuple(c.token_ids)) for r, c in zip(asked, sampled, strict=True)]
        )
        scorer.close()
    for index, completion in enumerate(sampled):
        versions = completion.policy_version
        per_token = versions if isinstance(versions, list) else [versions] * len(completion.token_ids)
        assert per_token == sorted(per_token)
        for at, version in enumerate(per_token):
            assert abs(completion.logprobs[at] - scores[version][index][at]) < 1e-4
    await asyncio.to_thread(engine.load_weights, refs[0])


async def test_bad_weights_are_refused_or_stop_the_engine(
    vllm_model: str, engine: VLLMEngine, reference: TransformersEngine, tmp_path: Path
) -> None:
    tensors = dict(load_model(config(vllm_model)).named_parameters())
    tensors = {name: tensor.detach() for name, tensor in tensors.items()}
    good = publish(tensors, tmp_path / "good", 5)
    wrong = WeightRef(6, path=good.path, checksum="0" * 16)
    gone = WeightRef(6, path=str(tmp_path / "gone"), checksum=None)
    for bad, message in ((wrong, "checksum"), (gone, "no .safetensors")):
        with pytest.raises(SyncError, match=message):
            await asyncio.to_thread(engine.load_weights, bad)
        assert await gap(engine, reference, SamplingParams(max_tokens=20)) < 1e-4, "the old weights still serve"
    lacking = {name: tensor for name, tensor in tensors.items() if "layers.1.mlp" not in name}
    with pytest.raises(SyncError, match="no weights for"):
        await asyncio.to_thread(engine.load_weights, publish(lacking, tmp_path / "lacking", 7))
    (refused,) = await engine.generate(requests(1, SamplingParams(max_tokens=1)))
    assert refused.finish_reason == "error"
    assert "no whole weights" in (refused.error or "")
    assert await asyncio.to_thread(engine.load_weights, good) == 5
    assert await gap(engine, reference, SamplingParams(max_tokens=20)) < 1e-4
    with pytest.raises(SyncError, match="module"):
        engine.load_weights(WeightRef(8, module=torch.nn.Linear(1, 1)))


def test_several_devices_and_another_environment(vllm_model: str, tmp_path: Path) -> None:
    """Two processes for one model, in an environment that has vLLM and no mrl. In the end all are killed at once:
    nobody is left to tidy up, neither the workers' shared memory nor that of Python's own trackers."""
    other = tmp_path / "other"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(other)], check=True)
    (site,) = (other / "lib").glob("python*/site-packages")
    (site / "packages.pth").write_text("\n".join(p for p in sys.path if p.endswith("site-packages")))
    python = str(other / "bin" / "python")
    seen = subprocess.run(
        [python, "-c", "import vllm.version, mrl"], capture_output=True, text=True, cwd="/", env={"PATH": "/bin"}
    )
    assert "No module named 'mrl'" in seen.stderr
    engine = VLLMEngine.create(config(vllm_model), vllm_python=python, tensor_parallel_size=2)
    try:
        assert Path(f"/proc/{engine.pid}/cmdline").read_bytes().startswith(python.encode())
        scorer = TransformersEngine.create(config(vllm_model))
        model = scorer._lm.module  # type: ignore[union-attr]
        for version in (0, 1):
            worst = asyncio.run(gap(engine, scorer, SamplingParams(temperature=0.9, max_tokens=20)))
            assert worst < 1e-4, f"before update {version}"
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(torch.randn_like(p) * 0.02)
            ref = publish(dict(model.state_dict()), tmp_path / "weights", version + 1)
            engine.load_weights(ref)
            assert engine.held() == ref.checksum
        shared = shared_by(processes_of(engine.pid))
        assert shared
        os.killpg(engine.pid, signal.SIGKILL)
        for call in (engine.generate(requests(1, SamplingParams(max_tokens=200))), engine.health()):
            with pytest.raises(EngineDied, match="vLLM process died"):
                asyncio.run(call)
        assert not [path for path in shared if path.exists()]
    finally:
        engine.close()
