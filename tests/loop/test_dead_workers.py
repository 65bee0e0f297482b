"""Workers that die in the midst of a run are replaced, and the run is the one that it would have been."""

from __future__ import annotations

import json
import os
import random
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mrl.errors import WorkerDied
from mrl.store.checkpoints import newest_intact
from mrl.store.run import read_rows
from tests import small_runs
from tests.process_backend import ProcessHandle
from tests.small_runs import TASKS, record_of, same_weights

pytestmark = pytest.mark.usefixtures("processes")


def drawing(completions: list[str], **_: Any) -> list[float]:
    """Draws from the generator of its process."""
    return [len(set(text)) / 8 + 0.01 * random.random() for text in completions]


OPTIONS: dict[str, Any] = {
    "backend": "processes",
    "max_steps": 5,
    "reward_funcs": drawing,
    "eval_dataset": TASKS[:2],
    "eval_steps": 2,
    "beta": 0.01,
}

Kill = Callable[[str, str, int], None]


@pytest.fixture
def kill(monkeypatch: pytest.MonkeyPatch) -> Kill:
    """kill(worker, method, number): at the `number`th such call from here on, that worker is killed."""
    call, wanted, calls = ProcessHandle.call, [], []

    async def counted(self: ProcessHandle, method: str, *args: Any, **kwargs: Any) -> Any:
        calls.append((self.name, method))
        if (self.name, method, calls.count((self.name, method))) in wanted:
            os.kill(self.pid, signal.SIGKILL)
        return await call(self, method, *args, **kwargs)

    def from_here_on(worker: str, method: str, number: int) -> None:
        calls.clear()
        wanted.append((worker, method, number))

    monkeypatch.setattr(ProcessHandle, "call", counted)
    return from_here_on


def events_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in read_rows(folder, "events") if row["kind"] == kind]


def check(model: str, folder: Path, kill: Kill, deaths: list[tuple[str, str, int]], **changes: Any) -> Path:
    """A run in which these workers die is bit for bit the one in which none does."""
    options = OPTIONS | changes
    small_runs.run(model, folder / "calm", **options)
    for death in deaths:
        kill(*death)
    result = small_runs.run(model, folder / "stormy", **(options | {"report_to": ["jsonl"]}))
    assert (result.status, result.steps) == ("finished", 5)
    replaced = "sync/replaced"
    assert record_of(folder / "stormy", replaced) == record_of(folder / "calm", replaced)
    assert same_weights(folder / "stormy", folder / "calm")
    mine, theirs = (newest_intact(folder / name)[0] for name in ("stormy", "calm"))
    assert mine is not None
    assert theirs is not None
    assert mine.state | {"trackers": {}} == theirs.state | {"trackers": {}}
    rows = [json.loads(row) for row in (folder / "stormy" / "tracking.jsonl").read_text().splitlines()]
    trained = [row["step"] for row in rows if row["kind"] == "metrics" and "train/loss" in row]
    assert trained == [1, 2, 3, 4, 5]
    return folder / "stormy"


@pytest.mark.slow
def test_an_actor_that_dies_is_replaced_from_the_last_checkpoint(tiny_model: str, tmp_path: Path, kill: Kill) -> None:
    run = check(tiny_model, tmp_path, kill, [("actor", "learn", 3)], save_steps=1)
    (event,) = events_of(run, "restart")
    assert event["message"].startswith("step 3: actor: its process died during learn()")
    # The checkpoint of step 2 is written beside step 3, and may not have been whole.
    assert re.search(r"\. Going on after step [12] with a new worker$", event["message"])


@pytest.mark.slow
def test_without_a_checkpoint_it_goes_on_from_the_start(tiny_model: str, tmp_path: Path, kill: Kill) -> None:
    run = check(tiny_model, tmp_path, kill, [("actor", "learn", 2)], save_steps=0)
    (event,) = events_of(run, "restart")
    assert "Going on after step 0" in event["message"]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"async_mode": "pipeline", "save_steps": 2}, marks=pytest.mark.slow),
        pytest.param({"sync_weights_every": 2, "save_steps": 1}, marks=pytest.mark.soak),
        pytest.param({"use_lora": True, "num_iterations": 2, "save_steps": 2}, marks=pytest.mark.soak),
    ],
    ids=lambda changes: "-".join(changes),
)
def test_in_other_kinds_of_runs(tiny_model: str, tmp_path: Path, kill: Kill, changes: dict[str, Any]) -> None:
    deaths = [("actor", "learn", 4), ("actor", "finish_checkpoint", 2), ("actor", "write_weights", 6)]
    check(tiny_model, tmp_path, kill, deaths, **changes)


@pytest.mark.slow
def test_rollout_and_reward_workers_are_replaced_in_the_midst_of_a_step(
    tiny_model: str, tmp_path: Path, kill: Kill
) -> None:
    deaths = [("rollout-0", "generate", 3), ("rollout-1", "update_weights", 2), ("reward-1", "score", 2)]
    workers = {"num_rollout_workers": 2, "num_reward_workers": 2}
    run = check(tiny_model, tmp_path, kill, deaths, save_steps=0, **workers)
    notices = [event["message"] for event in events_of(run, "notice")]
    for name, _, _ in deaths:
        assert sum(notice.startswith(f"{name} is replaced") for notice in notices) == 1, name
    assert not events_of(run, "restart")


@pytest.mark.slow
def test_so_many_deaths_end_the_run(tiny_model: str, tmp_path: Path, kill: Kill) -> None:
    for number in range(2, 9):
        kill("actor", "learn", number)
    with pytest.raises(WorkerDied, match="actor: its process died"):
        small_runs.run(tiny_model, tmp_path / "r", **(OPTIONS | {"max_worker_restarts": 2}))
    assert len(events_of(tmp_path / "r", "restart")) == 2


@pytest.mark.slow
def test_an_actor_that_never_trained_is_not_started_again(tiny_model: str, tmp_path: Path, kill: Kill) -> None:
    kill("actor", "initialize", 1)
    with pytest.raises(WorkerDied, match=r"actor: its process died during initialize\(\)"):
        small_runs.run(tiny_model, tmp_path / "r", **OPTIONS)
    assert not events_of(tmp_path / "r", "restart")
