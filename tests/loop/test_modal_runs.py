"""Runs at Modal: they are the runs in one process, whatever dies in them, wherever their loop is."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mrl import MRLTrainer
from mrl.backends.modal.storage import CHECKPOINTS
from mrl.backends.remote import RemoteHandle
from mrl.errors import StoreError
from mrl.loop.on_modal import RunOnModal
from mrl.store.run import read_rows
from tests import small_runs
from tests.conftest import build_model
from tests.modal_account import account
from tests.rollouts.calling_model import build_calling_model
from tests.rollouts.openenv.test_openenv_runs import options as guessing
from tests.small_runs import same_weights

pytestmark = [pytest.mark.modal, pytest.mark.usefixtures("modal_account"), pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
ONE_THREAD = {"env": {"OMP_NUM_THREADS": "1"}}
"""As this process has it: other numbers of threads add in another order."""
ON_CPU = {"backend": "modal", "actor_gpu": "cpu", "rollout_gpu": "cpu", "backend_options": ONE_THREAD}


class Bomb:
    """Whoever reads it from a pickle dies."""

    def __reduce__(self) -> Any:
        return eval, ("__import__('os').kill(__import__('os').getpid(), 9)",)


class Fuse:
    """Whoever reads what came of it in another process ends that process's container."""

    def __init__(self, lit: bool = False) -> None:
        self.lit = lit

    def __reduce__(self) -> Any:
        end = "(__import__('os').kill(__import__('os').getppid(), 9), __import__('time').sleep(60))"
        return (eval, (end,)) if self.lit else (Fuse, (True,))


def test_a_run_with_deaths_is_the_run_in_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To rounding, with the loop and the reward here. A rollout worker's container dies while it generates and another
    one's while it loads weights, then the actor's."""
    model = str(build_model(tmp_path / "model"))
    options = {"num_rollout_workers": 2, "max_steps": 3}
    small_runs.run(model, tmp_path / "one", **options)
    call, calls, bombs = RemoteHandle.call, list[tuple[str, str]](), []
    deaths = [("rollout-0", "generate", 1), ("rollout-1", "update_weights", 2), ("actor", "learn", 3)]

    async def deadly(self: RemoteHandle, method: str, *args: Any, **kwargs: Any) -> Any:
        calls.append((self.name, method))
        if (self.name, method, calls.count((self.name, method))) in deaths:
            bombs.append(asyncio.gather(call(self, "close", Bomb()), return_exceptions=True))
        return await call(self, method, *args, **kwargs)

    monkeypatch.setattr(RemoteHandle, "call", deadly)
    result = small_runs.run(model, tmp_path / "there", **ON_CPU, **options)
    assert len(bombs) == 3
    assert result.status == "finished"
    for name in ("one", "there"):
        rows = list(read_rows(tmp_path / name, "rollouts"))
        assert len(rows) == len({(row["step"], row["id"]) for row in rows}) == 18, "none twice, none missing"
    small_runs.check_same_to_rounding(tmp_path / "there", tmp_path / "one")
    kinds = [row["kind"] for row in read_rows(tmp_path / "there", "events")]
    assert kinds.count("restart") == 1


def test_modal_run_of_the_example(tmp_path: Path, modal_variables: dict[str, str]) -> None:
    """The command, judged code, two rollout workers, the loop there. Detached, it goes on when the command is killed;
    the same command then brings what it has done. Then what the Volume holds, and one prompt."""
    import modal as client

    model = build_model(tmp_path / "model")
    env = {**os.environ, **modal_variables}

    def command(entry: str, *arguments: str, detached: bool = False) -> list[str]:
        run = ["run", *(["--detach"] if detached else []), f"{ROOT}/mrl/train.py::{entry}"]
        return [sys.executable, "-m", "modal", *run, *arguments]

    def modal(entry: str, *arguments: str) -> str:
        done = subprocess.run(
            command(entry, *arguments), env=env, cwd=tmp_path, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    here = {
        "model": model,
        "actor_gpu": "cpu",
        "rollout_gpu": "cpu",
        "sandbox": "local",
        "device": "cpu",
        "run_name": "r",
        "resume": "auto",
    }
    small = {"max_steps": 5, "batch_size": 2, "num_generations": 3, "max_completion_length": 6, "save_steps": 1}
    flags = [text for name, value in (here | small).items() for text in (f"--{name.replace('_', '-')}", str(value))]
    flags = [f"{ROOT}/examples/modal.yaml", *flags]
    volume = client.Volume.from_name("mrl-storage", create_if_missing=True, version=2)

    def newest() -> str:
        try:
            return max(entry.path.rpartition("/")[2] for entry in volume.listdir(f"{CHECKPOINTS}/r/checkpoints"))
        except (FileNotFoundError, ValueError, client.exception.NotFoundError):  # it has not begun
            return ""

    killed = subprocess.Popen(command("main", *flags, detached=True), env=env, cwd=tmp_path, stdout=subprocess.DEVNULL)
    wait_until(lambda: newest() >= "step-1" or killed.poll() is not None)
    killed.kill()
    assert killed.wait() == -signal.SIGKILL
    assert newest() < "step-5"
    assert not (tmp_path / "runs").exists()
    wait_until(lambda: newest() == "step-5")
    wait_until(lambda: client.Dict.from_name("mrl-storage-writers").get("r") is None)
    assert "finished after 5 steps" in modal("main", *flags, "--num-rollout-workers", "1")
    run = tmp_path / "runs" / "r"
    assert small_runs.steps_of(run) == [1, 2, 3, 4, 5]
    assert (run / "checkpoints" / "step-5" / "model.safetensors").exists()
    assert f"model: {model}" in (run / "config.yaml").read_text()
    assert all(row["status"] == "ok" for row in read_rows(run, "rollouts"))
    assert all(row["cost/dollars"] > 0 for row in read_rows(run, "metrics"))
    assert "r: steps 1, 2, 3, 4, 5" in modal("list_checkpoints_fn")
    sampled = modal("test_rollout_fn", "--model", str(model), "--gpu", "cpu", "--tokens", "3")
    assert '"tokens": 3' in sampled
    assert '"passed"' in modal("test_reward_fn")
    assert "data: " in modal("clear_cache")


def wait_until(holds: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.2)


def test_the_loop_dies_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In another container, after its last checkpoint, with an environment on a worker of its own: nothing of it is
    here. Whoever else would go on with it meanwhile is refused."""
    made = guessing(max_steps=6)
    made["rollout_options"] |= {"env_in": "worker", "servers": 2}
    guesser = str(build_calling_model(tmp_path / "guesser", ["0", "1", "2", "3"]))
    trainer = MRLTrainer(**small_runs.options(guesser, tmp_path / "mortal", **ON_CPU, **made))
    results: list[Any] = []
    runs: list[RunOnModal] = []
    make = RunOnModal.__init__
    monkeypatch.setattr(
        RunOnModal, "__init__", lambda self, *args, **more: (runs.append(self), make(self, *args, **more))[1]
    )
    thread = threading.Thread(target=lambda: results.append(trainer.train()))
    thread.start()
    import modal

    killed = False
    while thread.is_alive() and not killed:
        thread.join(0.5)
        module = sys.modules.get("mrl.backends.modal.app")
        if module is None or module.app.app_id is None:
            continue
        try:
            steps = module.volume.listdir(f"{CHECKPOINTS}/mortal/checkpoints")
        except (FileNotFoundError, modal.exception.NotFoundError):  # it has not begun
            continue
        if any(entry.path.endswith("step-1") for entry in steps):
            with pytest.raises(
                StoreError, match=rf"'mortal' .* is being written by a loop .* process {os.getpid()} on"
            ):
                small_runs.run(guesser, tmp_path / "twin" / "mortal", resume="auto", **ON_CPU, **made)
            call = runs[0]._there.stop.spawn(Bomb())
            time.sleep(0.3)
            call.cancel()  # or the next container gets it too
            killed = True
    thread.join()
    assert killed
    assert (results[0].status, results[0].steps) == ("finished", 6)
    assert small_runs.steps_of(tmp_path / "mortal") == list(range(1, 7))
    rows = list(read_rows(tmp_path / "mortal", "rollouts"))
    assert len(rows) == len({(row["step"], row["id"]) for row in rows}) == 36, "none twice, none missing"
    assert all(row["status"] == "ok" for row in rows)
    assert "resume" in [row["kind"] for row in read_rows(tmp_path / "mortal", "events")]


def test_simple_mode_and_its_actor_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = str(build_model(tmp_path / "model"))
    examples = [{"prompt": f"say {i}", "completion": str(i)} for i in range(8)]
    options = {
        "model": model,
        "device": "cpu",
        "mode": "simple",
        "algorithm": "sft",
        "train_dataset": examples,
        "batch_size": 4,
        "max_steps": 3,
        "save_steps": 1,
        "report_to": [],
    }
    here = MRLTrainer(**options, run_dir=str(tmp_path / "here")).train()
    bombs: list[Any] = []
    call = RemoteHandle.call

    async def deadly(self: RemoteHandle, method: str, *args: Any, **kwargs: Any) -> Any:
        written = (tmp_path / "there" / "checkpoints" / "step-1").exists()
        if written and not bombs:
            bombs.append(asyncio.gather(call(self, "close", Bomb()), return_exceptions=True))
        return await call(self, method, *args, **kwargs)

    monkeypatch.setattr(RemoteHandle, "call", deadly)
    on_cpu = {"backend": "modal", "actor_gpu": "cpu", "backend_options": {**ONE_THREAD, "loop": "here"}}
    there = MRLTrainer(**options, **on_cpu, run_dir=str(tmp_path / "there")).train()
    assert bombs
    assert there.status == "finished"
    assert there.metrics["train/loss"] == pytest.approx(here.metrics["train/loss"], abs=1e-6)
    assert same_weights(tmp_path / "there", tmp_path / "here")
    # With the loop there too, as where nothing is said of it.
    options["max_steps"] = 1
    small = {**ON_CPU, "rollout_gpu": None}
    assert MRLTrainer(**options, **small, run_dir=str(tmp_path / "all")).train().status == "finished"
    assert (tmp_path / "all" / "checkpoints" / "step-1" / "model.safetensors").exists()


def test_ranks_in_one_container(tmp_path: Path) -> None:
    model = str(build_model(tmp_path / "model"))
    small_runs.run(model, tmp_path / "one", max_steps=2)
    small_runs.run(model, tmp_path / "two", **{**ON_CPU, "actor_gpu": "cpu:2"}, max_steps=2)
    same_training(tmp_path / "one", tmp_path / "two")


@pytest.fixture
def modal_clusters(modal_account: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An account of its own, which has clusters."""
    from modal.client import _Client

    (tmp_path / "account").mkdir()
    with account(tmp_path / "account", ROOT / "tests" / "modal_clusters.py") as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        _Client._set_env_client(None)  # it has the account of other tests
        yield
        _Client._set_env_client(None)


@pytest.mark.usefixtures("modal_clusters")
def test_ranks_in_two_containers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster, whose second container dies: the actor goes on from its checkpoint in another one."""
    options = {"actor_gpu": "cpu:2", "backend_options": {**ONE_THREAD, "actor_nodes": 2}, "max_steps": 2}
    model = str(build_model(tmp_path / "model"))
    small_runs.run(model, tmp_path / "one", max_steps=2)
    call, steps = RemoteHandle.call, list[str]()

    async def dying(self: RemoteHandle, method: str, *args: Any, **kwargs: Any) -> Any:
        if (self.name, method) == ("actor-1", "learn"):
            steps.append(self.name)
            args = (Fuse(),) if len(steps) == 2 else args
        return await call(self, method, *args, **kwargs)

    monkeypatch.setattr(RemoteHandle, "call", dying)
    result = small_runs.run(model, tmp_path / "two", **{**ON_CPU, **options})
    assert result.status == "finished"
    assert [row["kind"] for row in read_rows(tmp_path / "two", "events")].count("restart") == 1
    same_training(tmp_path / "one", tmp_path / "two")


def same_training(one: Path, two: Path) -> None:
    """To what the ranks' order of adding leaves."""
    first, second = ([row for row in read_rows(path, "metrics") if "train/loss" in row] for path in (one, two))
    for metric in ("train/loss", "train/grad_norm", "train/tokens", "reward/mean"):
        assert [row[metric] for row in second] == pytest.approx([row[metric] for row in first], abs=2e-5), metric
