"""Every sync method into the real vLLM: after each, both sides give the same logprobs to the same tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mrl.actor.worker import ActorWorker
from mrl.backends import Resources
from mrl.backends.inline import InlineBackend, InlineHandle
from mrl.engines.vllm.engine import VLLMEngine
from mrl.sync import SYNC_METHODS
from mrl.system.gather import all_of
from mrl.types import GenerateRequest, Sample, SamplingParams, TrainBatch
from mrl.workers.pool import RolloutPool
from mrl.workers.rollout import RolloutWorker

pytestmark = pytest.mark.vllm

LORA = {"use_lora": True, "lora_r": 8, "lora_alpha": 16, "lora_dropout": 0.0}
KINDS: dict[str, dict[str, object]] = {
    "full-tied": {"model": "vllm_model"},
    "full-untied": {"model": "untied_vllm_model"},
    "lora-merged": {"model": "vllm_model", **LORA},
    "lora-adapter": {"model": "vllm_model", **LORA},
    "bfloat16": {"model": "vllm_model", "dtype": "bfloat16"},
}
SHARED = {"full-tied": "running_vllm", "lora-merged": "running_vllm", "lora-adapter": "running_vllm_with_adapters"}
METHODS = ("reload", "direct", "direct-network", "volume", "delta", "delta-direct", "delta-volume")
CASES = [
    *((kind, method) for kind in KINDS for method in METHODS if not (kind == "lora-adapter" and "delta" in method)),
    ("full-tied", "checkpoint"),
    pytest.param("lora-merged", "checkpoint", marks=pytest.mark.soak),
]
"""Differences are of all tensors: with an adapter alone they are refused before a run starts. A checkpoint takes an
engine's start, everything else a second."""


@pytest.fixture(scope="module")
def worker_of(request: pytest.FixtureRequest) -> Iterator[Callable[[str], RolloutWorker]]:
    """What serves a kind, for all methods; what they send differs, so each has to replace what the last one left."""
    workers: dict[str, RolloutWorker] = {}
    untouched: dict[str, str] = {}

    def get(kind: str) -> RolloutWorker:
        if kind not in workers:
            model = request.getfixturevalue(str(KINDS[kind]["model"]))
            untouched[model] = fingerprint(model)
            settings = {"device": "cpu", "max_model_len": 64} | KINDS[kind] | {"model": model}
            lora_sync = "adapter" if kind == "lora-adapter" else "merged"
            worker = RolloutWorker("vllm", settings, {"lora_sync": lora_sync, "sync_timeout": 60.0})
            if kind in SHARED:
                worker.engine = request.getfixturevalue(SHARED[kind])
            else:
                worker.load()
            workers[kind] = worker
        return workers[kind]

    yield get
    for kind, worker in workers.items():
        if kind in SHARED:
            worker.engine = None
        worker.close()
    for model, before in untouched.items():
        assert fingerprint(model) == before, "a run must not write where its model came from"


def fingerprint(folder: str) -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(folder).rglob("*")):
        digest.update(f"{path.name} {path.stat().st_mtime_ns}".encode())
        digest.update(path.read_bytes() if path.is_file() else b"")
    return digest.hexdigest()


async def pool_of(workers: list[Any]) -> RolloutPool:
    policy = RolloutPool(workers, 1000)
    await policy.ask_capacity()
    return policy


def requests(count: int = 8) -> list[GenerateRequest]:
    params = SamplingParams(temperature=0.8, max_tokens=12)
    return [GenerateRequest(str(i), (65 + i % 2, 66, 67), params, seed=i) for i in range(count)]


async def train_and_sync(name: str, settings: dict[str, object], worker: RolloutWorker, folder: Path) -> list[int]:
    """A few steps, a sync before each. Returns the bytes that travelled."""
    method, _, over = name.partition("-")
    backend = InlineBackend(120)
    arguments = {"model": settings, "training": {"learning_rate": 0.01}, "total_steps": 9}
    actor = await backend.spawn(ActorWorker, name="actor", resources=Resources(), args=arguments)
    await actor.call("initialize")
    handle = InlineHandle(worker, f"rollout-{name}", 120)
    lora = worker.options["lora_sync"] if settings.get("use_lora") else None
    extra = {"over": over or "reload", "full_every": 3} if method == "delta" else {}
    elsewhere = over == "network"  # the same machine under another name: everything goes over a connection
    sync = SYNC_METHODS.get(method)(
        folder / "weights", lora=lora, deadline=100.0, shares_modules=not elsewhere, **extra
    )
    first = SYNC_METHODS.get("reload")(folder / "first", lora=lora, deadline=100.0) if method == "checkpoint" else sync
    reports = [await first.sync(actor, [handle], 10)]
    policy = await pool_of([handle])
    seen = []
    limit = 0.1 if settings.get("dtype") == "bfloat16" else 1e-4
    for version in (11, 12) if method == "checkpoint" else (11, 12, 13):  # it starts a new engine each time
        completions = await all_of([policy.generate(request) for request in requests()])
        assert {c.policy_version for c in completions} == {version - 1}
        seen.append([c.token_ids for c in completions])
        samples = [
            Sample(list(r.prompt_ids), c.token_ids, c.logprobs, [1] * len(c.token_ids), version - 1)
            for r, c in zip(requests(), completions, strict=True)
        ]
        advantages = [1.0 if i % 2 else -1.0 for i in range(len(samples))]
        metrics = await actor.call("train_step", TrainBatch(samples, advantages, len(samples), 96, temperature=0.8))
        assert metrics["train/logprob_gap_max"] < limit, f"before step {version} the worker had other weights"
        if version < 12 or method != "checkpoint":
            reports.append(await sync.sync(actor, [handle], version))
    assert seen[0] != seen[-1], "training must have changed what is sampled, or the check above shows nothing"
    await actor.kill()
    first.close()
    sync.close()
    assert not (folder / "weights").exists()
    return [report.bytes for report in reports]


@pytest.mark.parametrize(("kind", "method"), CASES)
async def test_after_a_sync_the_logprobs_are_the_actors(
    kind: str,
    method: str,
    worker_of: Callable[[str], RolloutWorker],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = worker_of(kind)
    settings = worker.model_config.model_dump()
    if method == "direct-network":
        monkeypatch.setattr("mrl.workers.rollout.machine_id", lambda: "another-machine")
    assert isinstance(worker.engine, VLLMEngine)
    before = worker.engine.pid
    sizes = await train_and_sync(method, settings, worker, tmp_path)
    assert (worker.engine.pid != before) == (method == "checkpoint"), "only then is the engine rebuilt"
    model_bytes = (Path(str(settings["model"])) / "model.safetensors").stat().st_size
    if kind == "lora-adapter":
        assert max(sizes) < model_bytes / 2, "only the adapter travels"
    if kind == "bfloat16":
        assert max(sizes) < model_bytes * 0.6, "in the dtype that is served"
