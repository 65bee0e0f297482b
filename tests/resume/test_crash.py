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
from tests.conftest import build_model

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
    return {
        "model": model,
        "device": "cpu",
        "train_dataset": TASKS,
        "run_dir": str(folder),
        "resume": "auto",
        "report_to": [],
        "batch_size": 3,
        "num_generations": 3,
        "max_completion_length": 6,
        "temperature": 1.0,
        "top_p": 1.0,
        "learning_rate": 1e-3,
        "num_rollout_workers": 1,
        "weight_sync_method": "reload",
        "save_steps": 1,
        "save_total_limit": 3,
        "beta": 0.01,
        "eval_dataset": TASKS[:2],
        "eval_steps": 5,
        **changes,
    }


def run_with_kills(zygote: Zygote, options: dict[str, Any], kills: int, seed: int) -> Counter[str]:
    """Kill the run `kills` times, then let it finish. Returns how often each phase was hit.

    An attempt gets a few steps further at most, so a run of four steps per kill cannot end before its time.
    """
    rng = random.Random(seed)
    phases = [phase for phase in PHASES if phase != "sync" or options["weight_sync_method"] != "direct"]
    died: Counter[str] = Counter()
    while sum(died.values()) < kills:
        phase = rng.choice(phases)
        kill = {"phase": phase, "call": rng.randint(1, 3), "seed": rng.random()}
        answer = zygote.train(options, kill)
        if answer["killed"]:
            died[phase] += 1
        elif answer.get("status") == "finished":
            break
    assert zygote.train(options, None)["status"] == "finished"
    return died


def same(value: Any, other: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return torch.equal(value, other)
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(same(value[key], other[key]) for key in value)
    if isinstance(value, (list, tuple)):
        return len(value) == len(other) and all(map(same, value, other))
    return bool(value == other)


def record_of(folder: Path) -> dict[str, Any]:
    """Everything a run did that does not depend on the clock."""

    def timeless(row: dict[str, Any]) -> dict[str, Any]:
        clock = ("time", "rollout/tokens_per_second")
        return {key: repr(value) for key, value in row.items() if key not in clock and not key.startswith("time/")}

    def rollout(row: dict[str, Any]) -> list[Any]:
        return [row[key] for key in ("step", "id", "samples", "reward", "rewards", "advantage", "messages", "status")]

    return {
        "metrics": [timeless(row) for row in read_rows(folder, "metrics")],
        "rollouts": [rollout(row) for row in read_rows(folder, "rollouts")],
        "eval_metrics": [timeless(row) for row in read_rows(folder, "eval_metrics")],
        "eval_rollouts": [rollout(row) for row in read_rows(folder, "eval_rollouts")],
    }


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


def check(zygote: Zygote, model: str, tmp_path: Path, kills: int, seed: int, **changes: Any) -> Counter[str]:
    straight = options_for(model, tmp_path / "straight", **changes)
    assert zygote.train(straight, None)["status"] == "finished"
    crashed = options_for(model, tmp_path / "crashed", **changes)
    died = run_with_kills(zygote, crashed, kills, seed)
    assert_same_run(tmp_path / "crashed", tmp_path / "straight")
    return died


def test_a_few_kills(zygote: Zygote, tiny_model: str, tmp_path: Path) -> None:
    died = check(zygote, tiny_model, tmp_path, kills=6, seed=1, max_steps=24)
    assert sum(died.values()) == 6


def test_a_few_kills_with_the_next_step_in_flight(zygote: Zygote, tiny_model: str, tmp_path: Path) -> None:
    died = check(zygote, tiny_model, tmp_path, kills=4, seed=5, max_steps=16, async_mode="pipeline")
    assert sum(died.values()) == 4


def test_a_queue_that_is_killed_loses_no_task_and_repeats_none(zygote: Zygote, tiny_model: str, tmp_path: Path) -> None:
    """Its groups depend on who was faster; that each task is trained on once an epoch, or counted, does not."""
    options = options_for(tiny_model, tmp_path, async_mode="queue", max_staleness=2, max_steps=21)
    died = run_with_kills(zygote, options, kills=5, seed=3)
    assert sum(died.values()) == 5
    metrics = list(read_rows(tmp_path, "metrics"))
    assert [row["step"] for row in metrics] == list(range(1, 22))
    trained = Counter(row["task_id"] for row in read_rows(tmp_path, "rollouts") if row["status"] == "ok")
    dropped = int(sum(row["rollout/dropped_groups"] for row in metrics))
    last = newest_intact(tmp_path)[0]
    assert last is not None
    assert last.in_flight["tickets"] == []
    drawn = last.state["order"]["epoch"] * len(TASKS) + last.state["order"]["position"]
    assert sum(trained.values()) == 3 * (drawn - dropped)
    if not dropped:
        assert set(trained.values()) <= {3 * (drawn // len(TASKS)), 3 * -(-drawn // len(TASKS))}
    assert max(row["rollout/staleness_max"] for row in metrics) <= 2


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_fifty_kills_over_a_run(zygote: Zygote, tiny_model: str, tmp_path: Path) -> None:
    died = check(zygote, tiny_model, tmp_path, kills=60, seed=2, max_steps=240)
    assert sum(died.values()) == 60
    assert set(died) == set(PHASES)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "changes",
    [
        {"use_lora": True, "lora_r": 4, "lora_alpha": 8},
        {"num_iterations": 2, "lr_scheduler_type": "cosine", "warmup_steps": 3},
        {"weight_sync_method": "direct", "gradient_accumulation_steps": 2},
        {"sync_weights_every": 3, "save_steps": 2, "num_rollout_workers": 2},
        {"async_mode": "pipeline", "save_steps": 2},
    ],
    ids=["lora", "reuse", "direct", "stale_samplers", "pipeline"],
)
def test_kills_in_other_kinds_of_runs(zygote: Zygote, tiny_model: str, tmp_path: Path, changes: dict[str, Any]) -> None:
    died = check(zygote, tiny_model, tmp_path, kills=15, seed=3, max_steps=150, **changes)
    assert sum(died.values()) == 15


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kills_on_a_busy_machine(busy_machine: None, tmp_path: Path) -> None:
    """Steps so large that torch divides their sums among its threads, which are stopped at any moment."""
    model = str(build_model(tmp_path / "model", hidden_size=128))
    zygote = Zygote(threads=2)
    size = {"batch_size": 4, "num_generations": 8, "max_completion_length": 24}
    try:
        died = check(zygote, model, tmp_path, kills=3, seed=4, max_steps=12, **size)
    finally:
        zygote.process.kill()
    assert sum(died.values()) == 3
