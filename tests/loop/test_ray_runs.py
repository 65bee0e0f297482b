"""Runs on a Ray cluster are the runs in one process, whatever dies in them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from mrl.backends.ray.backend import RayHandle
from mrl.backends.ray.files import Files
from mrl.config import OrchestratorConfig
from mrl.errors import ConfigError
from mrl.loop.resources import settle_sync
from mrl.store.checkpoints import Checkpoint
from mrl.store.run import read_rows
from tests import small_runs
from tests.conftest import build_model
from tests.small_runs import record_of, same_weights

APART = {"shared_disk": False}


def test_the_object_store_is_rays() -> None:
    config = OrchestratorConfig.from_flat(backend="ray")
    settle_sync(config)
    assert config.runtime.weight_sync_method == "object_store"
    with pytest.raises(ConfigError, match=r"object_store is Ray's, and backend is inline; use reload, or backend: ray"):
        settle_sync(OrchestratorConfig.from_flat(weight_sync_method="object_store"))
    apart = {"backend": "ray", "backend_options": {"address": "auto"}}
    with pytest.raises(ConfigError, match=r"workers of backend ray do not see; use object_store"):
        settle_sync(OrchestratorConfig.from_flat(**apart, weight_sync_method="reload"))


@pytest.mark.ray
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("ray_cluster")
def test_a_run_with_deaths_is_the_run_in_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, without a disk in common: a rollout worker dies while it generates and another while it loads
    weights, then the reward worker, then the actor."""
    model = str(build_model(tmp_path / "model"))
    options = {"num_rollout_workers": 2, "max_steps": 3}
    small_runs.run(model, tmp_path / "one", **options)
    call, calls = RayHandle.call, list[tuple[str, str]]()
    deaths = [
        ("rollout-0", "generate", 1),
        ("rollout-1", "update_weights", 2),
        ("reward-0", "score", 2),
        ("actor", "learn", 3),
    ]

    async def deadly(self: RayHandle, method: str, *args: Any, **kwargs: Any) -> Any:
        calls.append((self.name, method))
        if (self.name, method, calls.count((self.name, method))) in deaths:
            os.kill(self.pid, signal.SIGKILL)
        return await call(self, method, *args, **kwargs)

    monkeypatch.setattr(RayHandle, "call", deadly)
    folders, make = list[str](), Files.__init__
    monkeypatch.setattr(Files, "__init__", lambda self, folder: (folders.append(folder), make(self, folder))[1])
    result = small_runs.run(model, tmp_path / "apart", backend="ray", backend_options=APART, **options)
    assert all(calls.count((name, method)) > number for name, method, number in deaths)
    (restart,) = [row for row in read_rows(tmp_path / "apart", "events") if row["kind"] == "restart"]
    assert "actor: its process died during learn()" in restart["message"]
    assert result.checkpoint == tmp_path / "apart" / "checkpoints" / "step-3"
    assert not Checkpoint(result.checkpoint, 3).problems()
    one, apart = (record_of(tmp_path / name, "sync/") for name in ("one", "apart"))
    assert one == apart
    assert same_weights(tmp_path / "one", tmp_path / "apart")
    assert folders
    assert not any(map(os.path.exists, folders))


@pytest.mark.ray
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("ray_cluster")
def test_trls_loop(tmp_path: Path) -> None:
    """Resumed once."""
    model = str(build_model(tmp_path / "model"))
    for steps in (1, 2):
        options = {"mode": "simple", "max_steps": steps, "resume": "auto"}
        small_runs.run(model, tmp_path / "here", **options)
        small_runs.run(model, tmp_path / "apart", backend="ray", backend_options=APART, **options)
    here, there = (record_of(tmp_path / name, "sync/") for name in ("here", "apart"))
    assert repr(here) == repr(there)  # TRL's logprobs are NaN
    assert same_weights(tmp_path / "here", tmp_path / "apart")


@pytest.mark.ray
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("ray_cluster")
def test_an_actor_of_two_ranks(tmp_path: Path) -> None:
    """Each an actor of Ray's; the weights they gather go through the object store."""
    model = str(build_model(tmp_path / "model"))
    small_runs.run(model, tmp_path / "one", max_steps=2)
    small_runs.run(model, tmp_path / "two", backend="ray", actor_gpu="cpu:2", max_steps=2)
    one, two = (
        [row for row in read_rows(tmp_path / name, "metrics") if "train/loss" in row] for name in ("one", "two")
    )
    for metric in ("train/loss", "train/grad_norm", "train/tokens", "reward/mean"):
        assert [row[metric] for row in two] == pytest.approx([row[metric] for row in one], abs=2e-5), metric
