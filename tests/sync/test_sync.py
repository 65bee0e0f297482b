"""Every sync method, with the real engine: the worker then samples from exactly the actor's weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from mrl.actor.worker import ActorWorker
from mrl.backends import Backend, Resources, make_backend
from mrl.errors import EngineError, SyncError
from mrl.sync import SYNC_METHODS
from mrl.sync.base import WeightSync
from mrl.system.gather import all_of
from mrl.types import GenerateRequest, Sample, SamplingParams, TrainBatch
from mrl.weights.checksum import _in_cache, checksum
from mrl.weights.tensors import open_folder
from mrl.workers.pool import RolloutPool
from mrl.workers.rollout import RolloutWorker
from tests.soak import rows_but


async def spawn_all(model: str, workers: int, **lora: object) -> tuple[Backend, Any, list[Any]]:
    backend = make_backend("inline", {}, 60)
    settings = {"model": model, "device": "cpu", "max_model_len": 64, **lora}
    actor = await backend.spawn(
        ActorWorker,
        name="actor",
        resources=Resources(),
        args={"model": settings, "training": {"learning_rate": 0.02}, "total_steps": 9},
    )
    handles = [
        await backend.spawn(
            RolloutWorker,
            name=f"rollout-{i}",
            resources=Resources(),
            args={"engine": "transformers", "model": settings},
        )
        for i in range(workers)
    ]
    await actor.call("initialize")
    return backend, actor, handles


def sync_by(method: str, folder: Path, backend: Backend) -> WeightSync:
    return SYNC_METHODS.get(method)(folder, shares_modules=backend.shares_memory)


async def pool_of(workers: list[Any]) -> RolloutPool:
    policy = RolloutPool(workers, 1000)
    await policy.ask_capacity()
    return policy


def requests(count: int = 6) -> list[GenerateRequest]:
    params = SamplingParams(temperature=1.0, max_tokens=8)
    return [GenerateRequest(str(i), (65 + i % 2, 66, 67), params, seed=i) for i in range(count)]


METHODS = ["reload", "direct", "volume", "delta", "checkpoint"]
IN_SHORT = [
    ("reload", "tiny_model", True),
    ("direct", "untied_model", True),
    ("direct", "experts_model", True),
    ("volume", "tiny_model", False),
    ("volume", "untied_model", True),
    ("delta", "untied_model", False),
    ("delta", "tiny_model", True),
    ("checkpoint", "experts_model", False),
    ("checkpoint", "untied_model", True),
]
"""Each method with each kind of weights, one way or the other; `make soak` has every pair."""
MODELS = [("tiny_model", False), ("tiny_model", True), ("untied_model", False), ("untied_model", True)]


@pytest.mark.parametrize(
    ("method", "fixture", "lora"),
    rows_but(
        IN_SHORT,
        [
            *((method, *model) for method in METHODS for model in [*MODELS, ("experts_model", False)]),
            *((method, "experts_model", True) for method in ("reload", "direct")),
        ],
    ),
)
async def test_after_a_sync_the_samplers_logprobs_are_the_actors(
    method: str, fixture: str, lora: bool, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    adapter = {"use_lora": True, "lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.0} if lora else {}
    backend, actor, workers = await spawn_all(request.getfixturevalue(fixture), 2, **adapter)
    sync = sync_by(method, tmp_path / "weights", backend)
    if (method, fixture, lora) == ("direct", "experts_model", True) and backend.shares_memory:
        with pytest.raises(SyncError, match="PEFT rebuilds layers of experts"):
            await sync.sync(actor, workers, 0)
        await backend.close()
        return
    await sync.sync(actor, workers, 0)
    if method == "reload":  # what any other engine loads
        plain = AutoModelForCausalLM.from_pretrained(request.getfixturevalue(fixture))
        plain.save_pretrained(tmp_path / "saved")
        with open_folder(tmp_path / "saved") as saved, open_folder(next((tmp_path / "weights").glob("v0"))) as sent:
            assert set(saved) == set(sent)
            assert all(torch.equal(saved[name], tensor) for name, tensor in sent.items())
    policy = await pool_of(workers)
    seen = []
    for version in (1, 2, 3):
        completions = await all_of([policy.generate(request) for request in requests()])
        assert {c.policy_version for c in completions} == {version - 1}
        seen.append([c.token_ids for c in completions])
        samples = [
            Sample(list(r.prompt_ids), c.token_ids, c.logprobs, [1] * len(c.token_ids), c.policy_version)
            for r, c in zip(requests(), completions, strict=True)
        ]
        advantages = [1.0 if i % 2 else -1.0 for i in range(len(samples))]
        metrics = await actor.call("train_step", TrainBatch(samples, advantages, len(samples), 48))
        assert metrics["train/logprob_gap_max"] < 1e-5, (
            f"before step {version} the worker was not on the actor's weights"
        )
        await sync.sync(actor, workers, version)
    assert seen[0] != seen[2], "training must have changed what is sampled, or the check above shows nothing"
    await backend.close()
    sync.close()
    assert not (tmp_path / "weights").exists()


async def test_reload_keeps_one_version_on_disk_and_direct_none(tiny_model: str, tmp_path: Path) -> None:
    backend, actor, workers = await spawn_all(tiny_model, 1)
    sync = sync_by("reload", tmp_path / "weights", backend)
    for version in range(3):
        await sync.sync(actor, workers, version)
        assert [p.name for p in (tmp_path / "weights").glob("v*")] == [f"v{version}"]
    await backend.close()


@pytest.mark.inline("its subject is a module that is shared")
async def test_direct_shares_the_module_itself(tiny_model: str, tmp_path: Path) -> None:
    backend, actor, workers = await spawn_all(tiny_model, 2)
    await sync_by("direct", tmp_path, backend).sync(actor, workers, 0)
    tensors = actor.worker.model.state_dict()
    for handle in workers:
        served = handle.worker.engine.state_dict()
        assert all(served[name].data_ptr() == tensor.data_ptr() for name, tensor in tensors.items())
    await backend.close()


class Liar(RolloutWorker):
    """Answers what it was told to hold, and holds something else."""

    def update_weights(self, ref):  # type: ignore[no-untyped-def]
        answer = super().update_weights(ref)
        with torch.no_grad():
            next(iter(self.engine.state_dict().values())).view(-1)[3] += 1e-3
        answer["checksum"] = self._checksum(ref)
        return answer


class Forgetful(RolloutWorker):
    def update_weights(self, ref):  # type: ignore[no-untyped-def]
        return super().update_weights(ref) | {"version": ref.version - 1}


@pytest.mark.parametrize(("worker", "message"), [(Liar, "checksum"), (Forgetful, "serves version 4")])
async def test_a_worker_that_does_not_hold_what_was_sent_is_found(
    worker: type, message: str, tiny_model: str, tmp_path: Path
) -> None:
    backend, actor, _ = await spawn_all(tiny_model, 1)
    settings = {"model": tiny_model, "device": "cpu", "max_model_len": 64}
    bad = await backend.spawn(
        worker, name="rollout-7", resources=Resources(), args={"engine": "transformers", "model": settings}
    )
    with pytest.raises(SyncError, match=rf"rollout-7: .*{message}"):
        await sync_by("reload", tmp_path / "weights", backend).sync(actor, [bad], 5)
    await backend.close()


async def test_a_full_disk_is_said(tiny_model: str, tmp_path: Path) -> None:
    backend, actor, workers = await spawn_all(tiny_model, 1)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SyncError, match="could not be written"):
        await sync_by("reload", tmp_path / "file", backend).sync(actor, workers, 0)
    await backend.close()


async def test_a_worker_without_weights_refuses_to_generate(tiny_model: str) -> None:
    backend, _, workers = await spawn_all(tiny_model, 1)
    with pytest.raises(EngineError, match="no weights yet"):
        await workers[0].call("generate", requests(1))
    assert await workers[0].call("health") == {"version": None}
    await backend.close()


def test_checksum_sees_changes_swaps_and_signs() -> None:
    base = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    mark = checksum(base)
    assert checksum({name: t.clone() for name, t in base.items()}) == mark
    swapped = base["a"].clone()
    swapped[0, 0], swapped[1, 2] = base["a"][1, 2], base["a"][0, 0]
    changed = base["b"].clone()
    changed[2] = 1.0078125  # one bit of bfloat16
    for other in (
        {**base, "a": swapped},
        {**base, "b": changed},
        {**base, "a": base["a"].reshape(3, 2)},
        {**base, "a": -base["a"]},
        {"a": base["a"], "c": base["b"]},
    ):
        assert checksum(other) != mark


def test_checksum_in_pieces_is_exact() -> None:
    table = torch.randint(-(2**62), 2**62, (77, 4096))
    rows, columns = _in_cache(table)
    assert torch.equal(rows, table.sum(1))
    assert torch.equal(columns, table.sum(0))
    mark = checksum({"a": table})
    table[70, 9] += 1
    assert checksum({"a": table}) != mark


async def test_work_is_spread_and_comes_back_in_order(tiny_model: str, tmp_path: Path) -> None:
    backend, actor, workers = await spawn_all(tiny_model, 3)
    sync = sync_by("direct", tmp_path, backend)
    await sync.sync(actor, workers, 0)
    params = SamplingParams(temperature=1.0, max_tokens=4)
    many = [GenerateRequest(f"r{i}", (65 + i % 5, 70), params, seed=i) for i in range(20)]
    alone, spread = [
        await all_of([policy.generate(request) for request in many])
        for policy in (await pool_of(workers[:1]), await pool_of(workers))
    ]
    assert [c.request_id for c in spread] == [r.id for r in many]
    assert [c.token_ids for c in spread] == [c.token_ids for c in alone]
    await backend.close()
    sync.close()
