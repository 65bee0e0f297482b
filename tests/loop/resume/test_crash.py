"""A run that is killed, again and again, at any moment, is the run that was not: bit for bit."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mrl.store.checkpoints import list_checkpoints, newest_intact
from mrl.store.run import read_rows
from tests import small_runs
from tests.conftest import build_model
from tests.small_runs import record_of
from tests.soak import but

PHASES = ("start", "generate", "reward", "optimizer", "checkpoint", "database", "sync", "any")
TASKS = [{"prompt": f"say {i}"} for i in range(7)]  # 7 tasks, 3 a step: epochs end within, and in shorter batches


class Zygote:
    def __init__(self, threads: int = 1) -> None:
        script = Path(__file__).parent / "zygote.py"
        self.process = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"},
        )

    def train(self, options: dict[str, Any], kill: dict[str, Any] | None) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"options": options, "kill": kill}) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        assert "error" not in answer, answer["error"]
        return answer


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    made = Zygote()
    yield made
    made.process.kill()


@pytest.fixture(scope="module")
def busy_machine() -> Iterator[None]:
    """Another process for each core wants it."""
    others = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    yield
    for other in others:
        other.kill()
        other.wait()


def options_for(model: str, folder: Path, **changes: Any) -> dict[str, Any]:
    """As JSON holds them: the reward function is the other process's."""
    evaluated = {"eval_dataset": TASKS[:2], "eval_steps": 5, "beta": 0.01}
    sizes = {"train_dataset": TASKS, "batch_size": 3, "save_total_limit": 3, "weight_sync_method": "reload"}
    made = small_runs.options(model, folder, resume="auto", **(evaluated | sizes | changes))
    del made["reward_funcs"]
    return made


def every_phase(seed: int, **changes: Any) -> list[str]:
    """Each of them once, in any order. Weights that are handed over directly are not written."""
    phases = [phase for phase in PHASES if phase != "sync" or changes.get("weight_sync_method") != "direct"]
    return random.Random(seed).sample(phases, len(phases))


def run_with_kills(zygote: Zygote, options: dict[str, Any], phases: list[str], seed: int) -> None:
    """Kill the run once in each of `phases`, in turn, then let it finish.

    An attempt gets two or three steps further at most, so a run of four steps per kill cannot end before its time.
    """
    rng = random.Random(seed)
    for phase in phases:
        for _ in range(9):  # a phase may be over before its moment comes
            answer = zygote.train(options, {"phase": phase, "call": rng.randint(1, 2), "seed": rng.random()})
            assert answer.get("status") != "finished", f"it ended before it was killed in {phase}"
            if answer["killed"]:
                break
        else:
            raise AssertionError(f"never killed in {phase}")
    assert zygote.train(options, None)["status"] == "finished"


def same(value: Any, other: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return torch.equal(value, other)
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(same(value[key], other[key]) for key in value)
    if isinstance(value, (list, tuple)):
        return len(value) == len(other) and all(map(same, value, other))
    return bool(value == other)


def assert_same_run(folder: Path, other: Path) -> None:
    mine, theirs = record_of(folder), record_of(other)
    for kind, rows in mine.items():
        assert len(rows) == len(theirs[kind]), kind
        for row, expected in zip(rows, theirs[kind], strict=True):
            assert row == expected, kind
    last, expected_last = newest_intact(folder)[0], newest_intact(other)[0]
    assert last is not None
    assert expected_last is not None
    assert last.step == expected_last.step
    for name in ("model.safetensors", "adapter_model.safetensors"):
        assert (last.path / name).exists() == (expected_last.path / name).exists()
        if (last.path / name).exists():
            assert same(load_file(last.path / name), load_file(expected_last.path / name)), name
    for name in ("optimizer.pt", "scheduler.pt"):
        load = [torch.load(c.path / "trainer" / name, weights_only=True) for c in (last, expected_last)]
        assert same(*load), name
    state, expected_state = last.state, expected_last.state
    assert state == expected_state
    assert [c.step for c in list_checkpoints(folder)] == [c.step for c in list_checkpoints(other)]


def check(zygote: Zygote, model: str, tmp_path: Path, phases: list[str], seed: int, **changes: Any) -> None:
    changes = {"max_steps": 4 * len(phases)} | changes
    straight = options_for(model, tmp_path / "straight", **changes)
    assert zygote.train(straight, None)["status"] == "finished"
    crashed = options_for(model, tmp_path / "crashed", **changes)
    run_with_kills(zygote, crashed, phases, seed)
    assert_same_run(tmp_path / "crashed", tmp_path / "straight")


KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"use_lora": True, "lora_r": 4, "lora_alpha": 8},
    "reuse": {"num_iterations": 2, "lr_scheduler_type": "cosine", "warmup_steps": 3},
    "direct": {"weight_sync_method": "direct", "gradient_accumulation_steps": 2},
    "stale_samplers": {"sync_weights_every": 3, "save_steps": 2, "num_rollout_workers": 2},
    "pipeline": {"async_mode": "pipeline", "save_steps": 2},
}


@pytest.mark.slow
def test_a_kill_in_every_phase(zygote: Zygote, tiny_model: str, tmp_path: Path) -> None:
    check(zygote, tiny_model, tmp_path, every_phase(seed=1), seed=1, max_steps=24)


@pytest.mark.slow
def test_kills_with_the_next_step_in_flight(zygote: Zygote, tiny_model: str, tmp_path: Path) -> None:
    check(zygote, tiny_model, tmp_path, ["generate", "checkpoint"], seed=5, async_mode="pipeline")


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_many_kills_in_every_kind_of_run(zygote: Zygote, tiny_model: str, tmp_path: Path, kind: str, seed: int) -> None:
    """Twenty or so each, every phase two or three times."""
    changes = KINDS[kind]
    phases = every_phase(seed, **changes) + every_phase(seed + 10, **changes) + every_phase(seed + 20, **changes)[:4]
    check(zygote, tiny_model, tmp_path, phases, seed, max_steps=10 * len(phases), **changes)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "kinds",
    but([("lora", "reuse", "stale_samplers")], [("lora", "reuse", "stale_samplers"), ("direct", "reuse")]),
    ids="-".join,
)
def test_kills_in_other_kinds_of_runs(zygote: Zygote, tiny_model: str, tmp_path: Path, kinds: tuple[str, ...]) -> None:
    changes = {name: value for kind in kinds for name, value in KINDS[kind].items()}
    phases = ["checkpoint", "optimizer", "any", "generate"]
    check(zygote, tiny_model, tmp_path, phases, seed=3, max_steps=40, **changes)


@pytest.mark.slow
def test_a_queue_that_is_killed_loses_no_task_and_repeats_none(zygote: Zygote, tiny_model: str, tmp_path: Path) -> None:
    """Its groups depend on who was faster; that each task is trained on once an epoch, or counted, does not."""
    options = options_for(tiny_model, tmp_path, async_mode="queue", max_staleness=2, max_steps=14)
    run_with_kills(zygote, options, ["generate", "any", "checkpoint"], seed=3)
    metrics = list(read_rows(tmp_path, "metrics"))
    assert [row["step"] for row in metrics] == list(range(1, 15))
    trained = Counter(row["task_id"] for row in read_rows(tmp_path, "rollouts") if row["status"] == "ok")
    dropped = int(sum(row["rollout/dropped_groups"] for row in metrics))
    last = newest_intact(tmp_path)[0]
    assert last is not None
    assert last.in_flight["batches"] == []
    drawn = last.state["order"]["epoch"] * len(TASKS) + last.state["order"]["position"]
    assert sum(trained.values()) == 3 * (drawn - dropped)
    if not dropped:
        assert set(trained.values()) <= {3 * (drawn // len(TASKS)), 3 * -(-drawn // len(TASKS))}
    assert max(row["rollout/staleness_max"] for row in metrics) <= 2


@pytest.mark.parametrize(
    ("phases", "steps"),
    [
        pytest.param(["optimizer"], 5, marks=pytest.mark.slow),
        pytest.param(["optimizer", "any", "generate"], 12, marks=pytest.mark.soak),
    ],
    ids=["one", "several"],
)
@pytest.mark.timeout(900)
def test_kills_on_a_busy_machine(busy_machine: None, tmp_path: Path, phases: list[str], steps: int) -> None:
    """Steps so large that torch divides their sums among its threads, which are stopped at any moment."""
    model = str(build_model(tmp_path / "model", hidden_size=128))
    zygote = Zygote(threads=2)
    size = {"batch_size": 4, "num_generations": 8, "max_completion_length": 24}
    try:
        check(zygote, model, tmp_path, phases, seed=4, max_steps=steps, **size)
    finally:
        zygote.process.kill()
