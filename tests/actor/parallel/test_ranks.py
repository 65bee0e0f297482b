"""An actor of several ranks against one process: the same numbers, whatever is divided."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from mrl.actor.lora import adapts_parameters
from mrl.actor.worker import ActorWorker
from mrl.errors import MRLError, WorkerDied
from mrl.store.checkpoints import Checkpoint
from mrl.types import TrainBatch
from tests.actor.actors import make_actor, make_batch
from tests.actor.parallel.ranks import processes
from tests.ports import free_port
from tests.soak import but

pytestmark = pytest.mark.slow

_actor: ActorWorker
"""Of this rank, between two calls."""
CASES: dict[str, dict[str, Any]] = {
    # Micro-batches of 20 tokens: rows have up to 20, so that the ranks have different numbers of them.
    "full": {
        "beta": 0.1,
        "num_iterations": 2,
        "max_tokens_per_micro_batch": 20,
        "weight_decay": 0.1,
        "max_logprob_gap": 0.01,
    },
    "lora": {"lora": True, "beta": 0.1, "num_iterations": 2, "gradient_checkpointing": True},
    "entropy": {"top_entropy_quantile": 0.5, "entropy_coef": 0.01, "packing": False, "gradient_accumulation_steps": 2},
    "bfloat16": {"dtype": "bfloat16", "learning_rate": 1e-4},
}
ROUNDING = {"bfloat16": 2e-2}
OTHERS: dict[str, dict[str, Any]] = {
    "untied": {"gradient_checkpointing": True},
    "experts": {"gradient_accumulation_steps": 2},
    "experts, lora": {"lora": True, "beta": 0.1},
}
"""On other models, which the first word names."""


def batches_for(model: str) -> list[TrainBatch]:
    """Three of seven samples, some of one prompt and one sampled by another policy; one of a single sample; and one
    without any."""
    batch = make_batch(model)
    batch.samples[5].logprobs = [value - 0.5 for value in batch.samples[5].logprobs]
    for sample in batch.samples[3:5]:
        sample.prompt_ids = batch.samples[3].prompt_ids
    single = dataclasses.replace(batch, samples=batch.samples[2:3], advantages=batch.advantages[2:3])
    empty = dataclasses.replace(batch, samples=[], advantages=[])
    return [batch, single, empty, batch, batch]


def train(model: str, batches: list[TrainBatch], folder: Path, port: int, case: dict[str, Any]) -> dict[str, Any]:
    """What an actor says on this rank, and in `folder` what it publishes and saves."""
    warnings.simplefilter("ignore")
    os.environ["MASTER_PORT"] = str(port)
    actor = make_actor(model, **{"learning_rate": 1e-3, **case})
    try:
        samples, temperature = batches[0].samples, batches[0].temperature
        refs = [actor.write_weights(str(folder / "first"), 0)]
        metrics, evidence = [], []
        for batch in batches:
            metrics.append(actor.train_step(batch))
            evidence.append(actor.mismatch_evidence())
        refs.append(actor.write_weights(str(folder / "last"), 5))
        refs.append(actor.write_memory(5, dtype="bfloat16"))
        if actor.world.first:
            shutil.copytree(refs[-1].path, folder / "memory")
        refs.append(actor.write_difference(str(folder / "delta"), 5, full=True))
        actor.write_model(str(folder / "model"), 5)
        if case.get("lora") and not adapts_parameters(actor.model):
            actor.write_weights(str(folder / "adapter"), 5, adapter=True)
        actor.save_checkpoint(str(folder / "step-5"), {}, beside=True)
        actor.finish_checkpoint()
        state = actor.optimizer.state[actor.parameters[0]]
        return {
            "metrics": metrics,
            "checksums": [ref.checksum for ref in refs],
            "kl": actor.reference_kl(samples, temperature) if case.get("beta") else [],
            "reference": actor.reference_logprobs(samples, temperature) if case.get("beta") else [],
            "evidence": [found and (found.gap, found.signed_gap, found.tokens, found.rounding) for found in evidence],
            "scores": actor.mismatch_probe.scores,
            "sharded": isinstance(actor.parameters[0], DTensor) and isinstance(state["exp_avg"], DTensor),
            "layers": sum(isinstance(module, FSDPModule) for module in actor.model.modules()),
        }
    finally:
        actor.close()


def close(got: Any, expected: Any, what: str, most: float = 2e-5) -> None:
    torch.testing.assert_close(
        torch.tensor(got, dtype=torch.float64),
        torch.tensor(expected, dtype=torch.float64),
        atol=most,
        rtol=most,
        msg=lambda text: f"{what}: {text}",
    )


def compare(got: list[dict[str, Any]], expected: dict[str, Any], case: str, most: float) -> None:
    for rank, found in enumerate(got):
        for step, (mine, one) in enumerate(zip(found["metrics"], expected["metrics"], strict=True)):
            assert mine.keys() == one.keys()
            for name in one:
                close(mine[name], one[name], f"{case}, rank {rank}, step {step}, {name}", most)
            mine, one = found["evidence"][step], expected["evidence"][step]
            assert (mine is None) is (one is None)
            if one is not None:
                close(mine[:3], one[:3], f"{case}: evidence", max(most, 1e-4))
        assert all((told is not None) is (rank == 0) for told in found["checksums"]), "rank 0 says where weights are"
        close(found["kl"], expected["kl"], f"{case}: KL", 1e-4)
        for mine, one in zip(found["reference"], expected["reference"], strict=True):
            close(mine, one, f"{case}: reference")
        for version, scores in expected["scores"].items():
            close(found["scores"][version], scores, f"{case}: scores", max(most, 1e-4))


def same_files(folder: Path, one: Path, most: float = 2e-5) -> None:
    files = sorted(path.relative_to(one) for path in one.rglob("*.safetensors"))
    assert files == sorted(path.relative_to(folder) for path in folder.rglob("*.safetensors"))
    for file in files:
        mine, theirs = load_file(folder / file), load_file(one / file)
        assert mine.keys() == theirs.keys(), file
        for name in theirs:
            near = most if theirs[name].dtype == torch.float32 else 1e-2
            torch.testing.assert_close(mine[name], theirs[name], atol=near, rtol=near)
    for name in ("config.json", "adapter_config.json"):
        for path in one.rglob(name):
            mine, theirs = json.loads((folder / path.relative_to(one)).read_text()), json.loads(path.read_text())
            for config in (mine, theirs):  # PEFT writes sets
                config |= {key: sorted(value) for key, value in config.items() if key.startswith("target_") and value}
            assert mine == theirs


def test_ranks_do_what_one_process_does(tiny_model: str, tmp_path: Path) -> None:
    """Loss, gradient norm, every metric, weights and files, on two ranks and on three."""
    batches = batches_for(tiny_model)
    expected = {}
    for name, case in CASES.items():
        expected[name] = train(tiny_model, batches, tmp_path / "one" / name, 0, case)
    assert any(expected["full"]["evidence"])
    for ranks, cases in ((2, CASES), (3, {"full": CASES["full"]})):
        with processes(ranks) as group:
            for name, case in cases.items():
                for way in ("fsdp", "ddp") if ranks == 2 and name in ("full", "lora") else ("fsdp",):
                    folder = tmp_path / f"{way}-{ranks}" / name
                    options = {**case, "actor_parallelism": way, "ddp_timeout": 60.0}
                    got = group.run(train, tiny_model, batches, folder, free_port(), options)
                    most = ROUNDING.get(name, 2e-5)
                    compare(got, expected[name], f"{name}, {way}", most)
                    same_files(folder, tmp_path / "one" / name, most)
                    assert all(found["sharded"] is (way == "fsdp") for found in got)
                    assert all(found["layers"] == (3 if way == "fsdp" else 0) for found in got)


@pytest.mark.parametrize("name", but(("experts, lora",), OTHERS))
def test_other_models_do_it_too(name: str, untied_model: str, experts_model: str, tmp_path: Path) -> None:
    """A head of its own, and experts that the files have one by one; with the resumed run's weights."""
    case, model = OTHERS[name], {"untied": untied_model, "experts": experts_model}[name.split(",")[0]]
    batches = batches_for(model)[:2]
    expected = train(model, batches, tmp_path / "one", 0, case)
    with processes(2) as group:
        got = group.run(train, model, batches, tmp_path / "two", free_port(), case)
        compare(got, expected, name, 2e-5)
        same_files(tmp_path / "two", tmp_path / "one")
        after = [tmp_path / f"again-{at}" / "step-7" for at in (1, 2)]
        group.run(resume, model, batches[0], str(tmp_path / "one" / "step-5"), str(after[0]), free_port(), case)
        resume(model, batches[0], str(tmp_path / "two" / "step-5"), str(after[1]), 0, case)
        same_files(after[0], after[1])


def resume(model: str, batch: TrainBatch, before: str | None, after: str, port: int, case: dict[str, Any]) -> Any:
    """Go on from a checkpoint, if there is one, for two steps, and write the next. Also how far dropout differs."""
    warnings.simplefilter("ignore")
    os.environ["MASTER_PORT"] = str(port)
    actor = make_actor(model, lr_scheduler_type="linear", **case)
    try:
        if before is not None:
            actor.load_checkpoint(before)
        metrics = [actor.train_step(batch) for _ in range(2)]
        actor.save_checkpoint(after, {})
        return metrics, torch.rand(1).item()
    finally:
        actor.close()


def resumed(model: str, batch: TrainBatch, folder: Path, sizes: list[int], case: dict[str, Any]) -> list[Any]:
    """A run that goes on with so many ranks each time. Metrics of its steps, on rank 0."""
    metrics, before = [], None
    for part, size in enumerate(sizes):
        after = folder / f"step-{2 * part + 2}"
        arguments = (model, batch, before and str(before), str(after), free_port(), case)
        if size == 1:
            metrics += resume(*arguments)[0]
        else:
            with processes(size) as group:
                answers = group.run(resume, *arguments)
            metrics += answers[0][0]
            assert len({drawn for _, drawn in answers}) == size  # what is random differs by rank
        assert (after / "trainer" / "optimizer").is_dir() is (size > 1 and case["actor_parallelism"] == "fsdp")
        assert Checkpoint(after, 0).problems() == []
        assert not list(folder.glob("*.partial"))
        before = after
    return metrics


def test_a_run_goes_on_with_another_number_of_ranks(tiny_model: str, tmp_path: Path) -> None:
    batch = make_batch(tiny_model)
    for name, case, orders in (
        ("full", {"actor_parallelism": "fsdp", "weight_decay": 0.1}, ([2, 4, 1, 2],)),
        ("lora", {"actor_parallelism": "fsdp", "lora": True}, ([1, 2, 1],)),
        ("ddp", {"actor_parallelism": "ddp"}, ([2, 1],)),
    ):
        for sizes in orders:
            expected = resumed(tiny_model, batch, tmp_path / f"{name}-one", [1] * len(sizes), case)
            got = resumed(tiny_model, batch, tmp_path / name, sizes, case)
            for step, (mine, one) in enumerate(zip(got, expected, strict=True)):
                for metric in ("train/loss", "train/grad_norm", "train/learning_rate", "train/entropy"):
                    close(mine[metric], one[metric], f"{name} {sizes}, step {step}, {metric}", 5e-5)
            same_files(tmp_path / name, tmp_path / f"{name}-one")


def begin(model: str, port: int, timeout: float) -> None:
    global _actor
    warnings.simplefilter("ignore")
    os.environ["MASTER_PORT"] = str(port)
    _actor = make_actor(model, actor_parallelism="fsdp", ddp_timeout=timeout)


def go_on(batch: TrainBatch) -> float:
    """Seconds until a step failed, from its beginning."""
    while True:
        began = time.monotonic()
        try:
            _actor.train_step(batch)
        except WorkerDied as error:
            return time.monotonic() - began if "ddp_timeout" in str(error) else -1.0


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_stops_ends_the_step(tiny_model: str, by: signal.Signals) -> None:
    """On the others, with an error, inside the time-out."""
    batch, timeout = make_batch(tiny_model), 4.0
    with processes(3) as group:
        group.run(begin, tiny_model, free_port(), timeout)
        group.start(go_on, batch)
        time.sleep(1.0)
        os.kill(group.processes[1].pid, by)
        for took in group.answers([0, 2], timeout=60):
            assert isinstance(took, float), took
            assert took >= 0
            assert by == signal.SIGKILL or took > 0.9 * timeout


def publish_badly(model: str, batch: TrainBatch, folder: Path, port: int) -> list[str]:
    """A disk that cannot be written to: every rank is told, and all go on together."""
    warnings.simplefilter("ignore")
    os.environ["MASTER_PORT"] = str(port)
    actor = make_actor(model, actor_parallelism="fsdp", ddp_timeout=30.0)
    said = []
    for act in (
        lambda: actor.write_weights(str(folder / "file" / "below"), 1),
        lambda: actor.write_difference(str(folder / "file" / "below"), 1, full=True),
        lambda: actor.save_checkpoint(str(folder / "file" / "step-1"), {}),
        lambda: actor.share_module(1),
        lambda: actor.leave_device(),
    ):
        with pytest.raises(MRLError) as caught:
            act()
        said.append(f"{type(caught.value).__name__}: {caught.value}")
    actor.train_step(batch)
    actor.close()
    return said


def test_what_fails_on_one_rank_is_told_on_all(tiny_model: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with processes(2) as group:
        first, second = group.run(publish_badly, tiny_model, make_batch(tiny_model), tmp_path, free_port())
    assert first == second
    kinds = [said.partition(":")[0] for said in first]
    assert kinds == ["SyncError", "SyncError", "CheckpointError", "SyncError", "TrainingError"]
