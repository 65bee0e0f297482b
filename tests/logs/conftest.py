"""A store with every kind of thing in it, small, and the page of it without a network."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from mrl.config import OrchestratorConfig
from mrl.logs.app import create_app
from mrl.logs.catalog import Catalog
from mrl.store.progress import Progress, WorkerHealth
from mrl.store.read import RunReader
from mrl.store.run import RunStore
from mrl.types import Group, Rollout, Sample, Task

STEPS, TASKS, ATTEMPTS = 12, 3, 4
MakeRun = Callable[..., Path]


def groups_of(step: int, *, evaluation: bool = False) -> list[Group]:
    """Rewards rise with the step; in each step's first group one attempt is cut and, in step 3, one failed."""
    groups = []
    for k in range(TASKS):
        task = Task(f"task/{k}", f"say {k}", {"family": f"f{k % 2}", "answer": str(k)})
        rollouts = []
        for i in range(1 if evaluation else ATTEMPTS):
            reward = float((step + k + i) % 4 < 1 + step // 4)
            said = f"answer {step}.{k}.{i}\n```python\nprint({k} < 1)\n```\n"
            ids = [10, 11, 12 + i]
            sample = Sample([1, 2], ids, [-0.1, -2.0, -0.5], [1, 0, 1], step - 1, "length" if i == 3 else "stop")
            if not evaluation:
                sample.trainer_gap = [0.25, 0.0, -0.004]
            messages = [{"role": "user", "content": task.prompt}, {"role": "assistant", "content": said}]
            rollout = Rollout(
                *(f"{step}-{k}-{i}", task.id, i, messages, [sample], task.prompt, said),
                reward=reward,
                rewards={"tests": reward, "style": 0.25},
                advantage=None if evaluation else reward - 0.5,
                extra={"verdict": {"status": "passed" if reward else "failed", "passed": int(reward), "tests": 1}},
                seconds={"generate": 0.5},
            )
            if step == 3 and k == i == 0 and not evaluation:
                rollout.fail("SandboxError: it broke")
            rollouts.append(rollout)
        groups.append(Group(task, rollouts))
    return groups


def write_run(
    folder: Path, *, steps: int = STEPS, status: str = "finished", costs: bool = False, **options: object
) -> Path:
    """A run of `steps` steps, evaluated after every fourth."""
    store = RunStore(folder, OrchestratorConfig.from_flat(model="starter", max_steps=steps, **options))
    store.event("start", "workers are up", total_steps=steps)
    store.report(
        Progress(steps, "training", workers=[WorkerHealth("rollout-0", version=3), WorkerHealth("actor", False)])
    )
    with RunReader(folder) as reader:
        while not (found := reader.progress()) or found["stage"] != "training":
            time.sleep(0.02)
    for step in range(1, steps + 1):
        metrics = {
            "reward/mean": step / 20,
            "reward/std": 0.1,
            "reward/tests/mean": step / 20,
            "reward/tests/std": 0.1,
            "reward/pass_rate": step / 30,
            "train/kl": float("nan") if step == 5 else 0.01 * step,
            "time/generate": 1.0,
            "time/train": 2.0,
            "train/logprob_gap": 1e-5 * step,
        }
        metrics |= {"cost/dollars": 0.25 * step} if costs else {}
        store.write_step(step, metrics, groups_of(step))
        if step % 4 == 0:
            store.write_eval(step, {"eval/mean": step / 24}, groups_of(step, evaluation=True))
    store.event("warning", "step 3: 1 of 12 rollouts could not be scored", step=3)
    if status != "running":
        store.finish(status)
    store.close()
    return folder


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs `first` and `second`."""
    root = tmp_path_factory.mktemp("runs")
    write_run(root / "first")
    write_run(root / "second", steps=8, learning_rate=3e-5)
    return root


@pytest.fixture(scope="session")
def client(runs: Path) -> TestClient:
    """Asks their page."""
    return client_of(runs)


def client_of(root: Path, folders: list[Path] | None = None, token: str | None = None) -> TestClient:
    """Asks the page of these runs."""
    return TestClient(create_app(Catalog(folders, root), token=token), base_url="http://127.0.0.1:8000")
