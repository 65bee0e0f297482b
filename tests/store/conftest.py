"""Groups of small rollouts, made here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mrl.config import OrchestratorConfig
from mrl.store.run import RunStore
from mrl.types import Group, Rollout, Sample, Task

MakeGroups = Callable[..., list[Group]]


def groups_of(step: int, tasks: int = 2, attempts: int = 2, *, failed: int = 0, prefix: str = "t") -> list[Group]:
    """Attempt i of task k at step s has reward (s + k + i) / 100; the first `failed` rollouts failed."""
    groups = []
    for k in range(tasks):
        task = Task(f"{prefix}{k}", f"say {k}", {"gold": k})
        rollouts = []
        for i in range(attempts):
            sample = Sample([1, 2], [3, 4 + i, 300], [-0.5, -1.5, -0.25], [1, 1, 1], step - 1)
            messages = [{"role": "user", "content": task.prompt}, {"role": "assistant", "content": f"{step} {k} {i}"}]
            rollout = Rollout(
                *(f"{step}-{k}-{i}", task.id, i, messages, [sample], task.prompt, f"{step} {k} {i}"),
                reward=(step + k + i) / 100,
                rewards={"f": (step + k + i) / 100},
                seconds={"generate": 0.5},
            )
            if k * attempts + i < failed:
                rollout.fail("SandboxError: it broke")
            rollouts.append(rollout)
        groups.append(Group(task, rollouts))
    return groups


@pytest.fixture
def make_groups() -> MakeGroups:
    return groups_of


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Writes a finished run of `steps` steps, evaluated after every second, and gives its folder."""

    def make(name: str = "run", steps: int = 6, failed: int = 0, **options: object) -> Path:
        store = RunStore(tmp_path / name, OrchestratorConfig.from_flat(**options))
        for step in range(1, steps + 1):
            store.write_step(step, {"reward/mean": step / 10, "train/loss": 0.5}, groups_of(step, failed=failed))
            if step % 2 == 0:
                store.write_eval(step, {"eval/mean": step / 20}, groups_of(step, tasks=1, attempts=1, prefix="e"))
            store.event("checkpoint", f"step {step}", step=step)
        store.finish("finished")
        store.close()
        return tmp_path / name

    return make
