"""The real tracking libraries, offline: values arrive, and a resumed run is the same run with every step once.

Needs `pip install 'mrl[trackers]'`; run with `pytest -m trackers`.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mrl.errors import ConfigError
from mrl.tracking import RunInfo, TrackerSet, check_trackers

pytestmark = pytest.mark.trackers

Points = dict[int, float]
"""Step to value; `read` fails on a step that is there twice."""


def once(points: list[tuple[int, float]]) -> Points:
    """Raises when a step is there twice."""
    found = dict(points)
    assert len(found) == len(points), f"doubled steps: {sorted(step for step, _ in points)}"
    return found


@dataclass
class Library:
    """One library and how to read back what it wrote."""

    name: str
    read: Callable[[Path, str, str], Points]
    """Folder, run id, metric."""
    latest_wins: bool
    """Whether a step that is logged again replaces the earlier one, or is left as it was."""
    infinite: bool = True
    """Whether it holds infinities."""


def wandb_records(folder: Path) -> Iterator[Any]:
    """Records of every .wandb file, oldest first."""
    from mrl.tracking.wandb_files import records

    settle()
    for path in sorted((folder / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        yield from records(path)


def settle() -> None:
    """W&B's service closes its file some milliseconds after `finish` returned; this waits for it to end."""
    if wandb := sys.modules.get("wandb"):
        wandb.teardown()


def read_wandb(folder: Path, run_id: str, metric: str) -> Points:
    records = list(wandb_records(folder))
    assert {record.run.run_id for record in records if record.WhichOneof("record_type") == "run"} == {run_id}
    points = []
    for record in records:
        row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        if metric in row:
            points.append((int(row["_step"]), float(row[metric])))
    return once(points)


def read_trackio(folder: Path, run_id: str, metric: str) -> Points:
    # The library finds its folder when it is imported, so every test has the same one.
    from trackio.sqlite_storage import SQLiteStorage

    with sqlite3.connect(SQLiteStorage.get_project_db_path(os.environ["TRACKIO_PROJECT"])) as database:
        rows = database.execute("SELECT run_id, step, metrics FROM metrics").fetchall()
    assert {row[0] for row in rows} == {run_id}
    return once([(step, float(row[metric])) for _, step, raw in rows if metric in (row := json.loads(raw))])


def read_tensorboard(folder: Path, run_id: str, metric: str) -> Points:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return once([(event.step, event.value) for event in events.Scalars(metric)])


def read_mlflow(folder: Path, run_id: str, metric: str) -> Points:
    from mlflow import MlflowClient

    client = MlflowClient()
    experiment = client.get_experiment_by_name("mrl")
    assert experiment is not None
    assert [run.info.run_id for run in client.search_runs([experiment.experiment_id])] == [run_id]
    return once([(point.step, point.value) for point in client.get_metric_history(run_id, metric)])


LIBRARIES = [
    Library("wandb", read_wandb, latest_wins=False),
    Library("trackio", read_trackio, latest_wins=False),
    Library("tensorboard", read_tensorboard, latest_wins=True),
    Library("mlflow", read_mlflow, latest_wins=False, infinite=False),
]


@pytest.fixture(scope="session", autouse=True)
def own_folders(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["TRACKIO_DIR"] = str(tmp_path_factory.mktemp("trackio"))


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MLflow's tables, which take seconds to make."""
    from mlflow import MlflowClient

    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, empty_database: Path) -> None:
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    for name in ("WANDB_RUN_ID", "WANDB_NAME", "WANDB_DIR", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_PROJECT", tmp_path.parent.name + tmp_path.name)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)


@pytest.fixture(params=LIBRARIES, ids=lambda library: library.name)
def library(request: pytest.FixtureRequest) -> Library:
    found: Library = request.param
    importlib.import_module(found.name)
    return found


CONFIG = {"model": {"model": "starter"}, "training": {"seed": 3, "stop": ["a", "b"], "learning_rate": 1e-5}}


def run_steps(
    folder: Path, names: list[str], steps: range, *, ids: dict[str, str] | None = None, version: float = 0.0
) -> dict[str, str]:
    """A run that does `steps`, evaluates after each even one, and ends."""
    said: list[str] = []
    trackers = TrackerSet(names, said.append)
    trackers.start(RunInfo("my-run", folder, 10, CONFIG, step=steps[0] - 1, resume_ids=ids or {}))
    for step in steps:
        trackers.log(step, {"reward/mean": step + version, "time/step": 0.1, "odd@name": 1.0})
        if step % 2 == 0:
            trackers.log(step, {"eval/pass_rate": step / 10})
            trackers.note(f"evaluated after {step}")
    found = trackers.run_ids()
    trackers.finish()
    settle()
    assert said == []
    return found


def test_values_arrive(library: Library, tmp_path: Path) -> None:
    ids = run_steps(tmp_path, [library.name], range(1, 6))
    run_id = ids.get(library.name, "")
    assert library.read(tmp_path, run_id, "reward/mean") == {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0, 5: 5.0}
    assert library.read(tmp_path, run_id, "eval/pass_rate") == pytest.approx({2: 0.2, 4: 0.4})
    name = "odd_name" if library.name == "mlflow" else "odd@name"
    assert len(library.read(tmp_path, run_id, name)) == 5


def test_a_resumed_run_is_the_same_run_with_every_step_once(library: Library, tmp_path: Path) -> None:
    first = run_steps(tmp_path, [library.name], range(1, 7))
    second = run_steps(tmp_path, [library.name], range(4, 10), ids=first, version=100.0)
    third = run_steps(tmp_path, [library.name], range(10, 12), ids=second, version=100.0)
    assert first == second == third
    again = 3 if library.latest_wins else 6
    assert library.read(tmp_path, first.get(library.name, ""), "reward/mean") == {
        step: step + (100.0 if step > again else 0.0) for step in range(1, 12)
    }
    assert sorted(library.read(tmp_path, first.get(library.name, ""), "eval/pass_rate")) == [2, 4, 6, 8, 10]


@pytest.mark.parametrize("library", LIBRARIES[:3], ids=lambda library: library.name)  # MLflow gives the ids itself
def test_a_resumed_run_whose_record_is_gone_goes_on_under_its_id(library: Library, tmp_path: Path) -> None:
    ids = {} if library.name == "tensorboard" else {library.name: "abcd1234"}
    assert run_steps(tmp_path, [library.name], range(4, 6), ids=ids) == ids
    assert library.read(tmp_path, ids.get(library.name, ""), "reward/mean") == {4: 4.0, 5: 5.0}


def test_what_is_not_finite_is_seen(library: Library, tmp_path: Path) -> None:
    trackers = TrackerSet([library.name], pytest.fail)
    trackers.start(RunInfo("my-run", tmp_path, 10, CONFIG))
    trackers.log(1, {"train/loss": math.nan, "train/kl": math.inf})
    run_id = trackers.run_ids().get(library.name, "")
    trackers.finish()
    assert math.isnan(library.read(tmp_path, run_id, "train/loss")[1])
    if library.infinite:
        assert library.read(tmp_path, run_id, "train/kl") == {1: math.inf}
    else:
        assert library.read(tmp_path, run_id, "train/kl/non_finite") == {1: 1.0}


def test_a_long_run_offline_is_resumed_where_its_files_end(tmp_path: Path) -> None:
    from mrl.tracking.wandb_files import last_step

    trackers = TrackerSet(["wandb"], pytest.fail)
    trackers.start(RunInfo("my-run", tmp_path, 1000, CONFIG))
    for step in range(1, 301):
        trackers.log(step, {f"reward/{name}/mean": 1.0 for name in range(20)})
    ids = trackers.run_ids()
    trackers.finish()
    settle()
    assert last_step(tmp_path / "wandb", ids["wandb"]) == 300
    assert len(read_wandb(tmp_path, ids["wandb"], "reward/19/mean")) == 300
    path = next(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    path.write_bytes(path.read_bytes()[:200_000])  # a killed process
    run_steps(tmp_path, ["wandb"], range(290, 311), ids=ids)
    assert sorted(read_wandb(tmp_path, ids["wandb"], "reward/mean"))[-1] == 310
    assert last_step(tmp_path / "wandb", "another") == -1


def test_wandb_disabled_is_no_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    ids = run_steps(tmp_path, ["wandb"], range(1, 4))
    assert run_steps(tmp_path, ["wandb"], range(3, 6), ids=ids) == ids


def test_two_runs_of_one_name_stay_apart_in_trackio(tmp_path: Path) -> None:
    from trackio.sqlite_storage import SQLiteStorage

    first = run_steps(tmp_path / "a", ["trackio"], range(1, 4))
    other = run_steps(tmp_path / "b", ["trackio"], range(1, 3), version=50.0)
    assert run_steps(tmp_path / "a", ["trackio"], range(4, 6), ids=first) == first
    with sqlite3.connect(SQLiteStorage.get_project_db_path(os.environ["TRACKIO_PROJECT"])) as database:
        counts = dict(database.execute("SELECT run_id, COUNT(DISTINCT step) FROM metrics GROUP BY run_id").fetchall())
    assert counts == {first["trackio"]: 5, other["trackio"]: 2}


def test_configuration_name_and_end_are_recorded(tmp_path: Path) -> None:
    from mlflow import MlflowClient
    from trackio.sqlite_storage import SQLiteStorage

    ids = run_steps(tmp_path, ["wandb", "trackio", "mlflow"], range(1, 3))
    run = MlflowClient().get_run(ids["mlflow"])
    assert run.info.run_name == "my-run"
    assert run.info.status == "FINISHED"
    assert run.data.params["training.seed"] == "3"
    assert run.data.params["training.stop"] == "['a', 'b']"
    config = SQLiteStorage.get_run_config(os.environ["TRACKIO_PROJECT"], run_id=ids["trackio"])
    assert config is not None
    assert config["training"] == CONFIG["training"]
    records = list(wandb_records(tmp_path))
    started = next(record.run for record in records if record.WhichOneof("record_type") == "run")
    options = {item.key: json.loads(item.value_json) for item in started.config.update if item.key in CONFIG}
    assert (started.project, started.display_name, options) == ("mrl", "my-run", CONFIG)
    assert [record.exit.exit_code for record in records if record.WhichOneof("record_type") == "exit"] == [0]


@pytest.mark.parametrize(
    ("status", "mlflow_status", "exit_code"), [("interrupted", "KILLED", 130), ("failed", "FAILED", 1)]
)
def test_how_a_run_ended_is_recorded(tmp_path: Path, status: Any, mlflow_status: str, exit_code: int) -> None:
    from mlflow import MlflowClient

    trackers = TrackerSet(["wandb", "mlflow"], pytest.fail)
    trackers.start(RunInfo("my-run", tmp_path, 10, CONFIG))
    ids = trackers.run_ids()
    trackers.finish(status)
    assert MlflowClient().get_run(ids["mlflow"]).info.status == mlflow_status
    assert [r.exit.exit_code for r in wandb_records(tmp_path) if r.WhichOneof("record_type") == "exit"] == [exit_code]


def test_one_that_fails_leaves_the_others_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/no/such/folder/mlflow.db")
    (tmp_path / "no").write_text("a file")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "no" / "where"))
    said: list[str] = []
    trackers = TrackerSet(["mlflow", "wandb", "tensorboard", "jsonl"], said.append)
    trackers.start(RunInfo("my-run", tmp_path, 10, CONFIG))
    trackers.log(1, {"reward/mean": 1.0})
    trackers.finish()
    assert len(said) == 2
    assert {message.split(" failed")[0] for message in said} == {"tracker mlflow", "tracker wandb"}
    assert read_tensorboard(tmp_path, "", "reward/mean") == {1: 1.0}
    assert '"reward/mean": 1.0' in (tmp_path / "tracking.jsonl").read_text()


def test_stdout_stays_free_for_results(tmp_path: Path) -> None:
    program = f"""
from pathlib import Path
from mrl.tracking import RunInfo, TrackerSet
trackers = TrackerSet(["wandb", "trackio", "tensorboard", "mlflow", "jsonl", "console"], print)
trackers.start(RunInfo("my-run", Path({str(tmp_path)!r}), 1, {{}}))
trackers.log(1, {{"reward/mean": 1.0}})
trackers.finish()
print("results")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "results\n"), done.stderr


def test_wandb_without_a_key_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    check_trackers(["wandb", "trackio", "tensorboard", "mlflow"])
    program = "from mrl.tracking import check_trackers; check_trackers(['wandb'])"
    bare = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=bare | {"HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "ConfigError: report_to: wandb has no API key; run `wandb login`" in done.stderr


def test_mlflow_without_a_driver_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from mrl.tracking import mlflow

    monkeypatch.setattr(mlflow.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"sqlalchemy is missing; pip install 'mrl\[mlflow\]'"):
        mlflow.MlflowTracker.check()
