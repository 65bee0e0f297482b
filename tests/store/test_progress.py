"""What a run is doing can be seen while it does it, from another process, and what is newer than what was seen."""

from __future__ import annotations

import json
import math
import os
import socket
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mrl.config import OrchestratorConfig
from mrl.errors import StoreError
from mrl.store import writer
from mrl.store.filters import Filter
from mrl.store.find import SILENT_SECONDS, summarize
from mrl.store.progress import Progress, WorkerHealth
from mrl.store.read import RunReader
from mrl.store.run import RunStore, read_rows
from mrl.store.schema import PROGRESS, VERSION
from mrl.system.machine import booted, machine_id

CONFIG = OrchestratorConfig()

WRITER = """
    import pathlib, sys
    from mrl.config import OrchestratorConfig
    from mrl.store.progress import Progress, WorkerHealth
    from mrl.store.run import RunStore

    store = RunStore(pathlib.Path(sys.argv[1]), OrchestratorConfig())
    print("ready", flush=True)
    for line in sys.stdin:
        what, number = line.split()
        if what == "step":
            store.write_step(int(number), {"reward/mean": float(number), f"only/{number}": 0.5}, [])
            store.flush()
        else:
            workers = [WorkerHealth("rollout-0", version=int(number)), WorkerHealth("rollout-1", False, None, 2)]
            store.report(Progress(int(number), "generating", 1.5, 3, 8, 12_345, 20, workers))
        print("done", flush=True)
    store.finish("finished")
    store.close()
"""


def until(found: Callable[[], Any]) -> Any:
    """What `found` gives as soon as it is something."""
    deadline = time.monotonic() + 60
    while not (value := found()):
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)
    return value


def test_another_process_follows_a_run_by_what_is_new(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:

        def tell(line: str) -> None:
            assert process.stdin
            assert process.stdout
            process.stdin.write(f"{line}\n")
            assert process.stdout.readline() == "done\n"

        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        with RunReader(folder) as reader:
            first = until(reader.progress)
            assert (first["stage"], first["step"], first["workers"]) == ("starting", 0, [])
            assert reader.progress(since=math.inf) is None

            tell("step 1")
            tell("step 2")
            assert reader.all_series() == {
                "reward/mean": [(1, 1.0), (2, 2.0)],
                "only/1": [(1, 0.5)],
                "only/2": [(2, 0.5)],
            }
            tell("step 3")
            assert reader.all_series(since=2) == {"reward/mean": [(3, 3.0)], "only/3": [(3, 0.5)]}
            assert reader.series("reward/mean", since=2) == [(3, 3.0)]
            assert reader.all_series(since=3) == {}

            tell("report 4")
            seen = until(lambda: (new := reader.progress(first["heartbeat"])) and new["step"] == 4 and new)
            assert {name: seen[name] for name in seen if name != "heartbeat"} == {
                "step": 4,
                "stage": "generating",
                "since": 1.5,
                "groups_done": 3,
                "groups_wanted": 8,
                "tokens": 12_345,
                "in_flight": 20,
                "workers": [
                    {"name": "rollout-0", "alive": True, "version": 4, "restarts": 0},
                    {"name": "rollout-1", "alive": False, "version": None, "restarts": 2},
                ],
            }
            assert until(lambda: reader.progress(seen["heartbeat"])), "a heartbeat where nothing changes"
            assert summarize(folder).status == "running"
            assert process.stdin
            process.stdin.close()
            process.wait()
            ended = reader.progress()
            assert ended is not None
            assert (ended["stage"], ended["step"], ended["in_flight"]) == ("finished", 4, 0)
            assert summarize(folder).progress == ended


def test_reporting_waits_for_nothing(tmp_path: Path) -> None:
    """The writing thread is held up, and its queue is full."""
    store = RunStore(tmp_path / "a", CONFIG)
    blocked = threading.Event()
    filling = threading.Thread(
        target=lambda: [store._writer.submit(lambda db: blocked.wait(60) and None) for _ in range(40)], daemon=True
    )
    filling.start()
    until(store._writer._queue.full)
    for tokens in range(1000):
        store.report(Progress(1, "generating", tokens=tokens))
    assert not blocked.is_set()
    blocked.set()
    filling.join()
    with RunReader(tmp_path / "a") as reader:
        until(lambda: (reader.progress() or {}).get("tokens") == 999)
    store.close()


def test_heartbeats_are_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it is told, and while steps are written without a pause: no more than one in so many seconds."""
    monkeypatch.setattr(writer, "NEWS_SECONDS", 0.2)
    store = RunStore(tmp_path / "a", CONFIG)
    beats = []
    beat = store._writer._heartbeat
    store._writer._heartbeat = lambda db: beats.append(time.monotonic()) or beat(db)  # type: ignore[func-returns-value]
    start = time.monotonic()
    for step in range(1, 400):
        store.report(Progress(step, "training"))
        store.write_step(step, {"a": 1.0}, [])
        time.sleep(0.002)
    store.close()
    assert 1 <= len(beats) <= (time.monotonic() - start) / 0.2 + 1


def test_a_run_that_goes_on_begins_anew_and_keeps_nothing_of_before(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    store = RunStore(folder, CONFIG)
    store.report(Progress(7, "training", tokens=100, workers=[WorkerHealth("rollout-0")]))
    with RunReader(folder) as reader:
        until(lambda: (reader.progress() or {}).get("step") == 7)
        store.close()
        assert (reader.progress() or {})["stage"] == "interrupted"
        store = RunStore.reopen(folder)
        until(lambda: (reader.progress() or {})["stage"] == "starting")
        begun = reader.progress() or {}
        assert (begun["step"], begun["tokens"], begun["workers"]) == (0, 0, [])
        store.report(Progress(5, "generating"))
        store.rewind(4)
        until(lambda: (reader.progress() or {})["step"] == 5)
    store.close()


def test_a_heartbeat_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    store = RunStore(tmp_path / "a", CONFIG)
    tried = threading.Event()

    def fail(db: sqlite3.Connection) -> None:
        tried.set()
        db.execute("no such SQL")

    store._writer._heartbeat = fail
    store.report(Progress(1, "generating"))
    assert tried.wait(60)
    store.write_step(1, {"a": 1.0}, [])
    store.close()
    assert [row["step"] for row in read_rows(tmp_path / "a", "metrics")] == [1]


def as_recorded(folder: Path, **values: Any) -> None:
    """Change what the store says of the run and its last sign of life."""
    with sqlite3.connect(folder / "run.db") as db:
        for name, value in values.items():
            db.execute(f"UPDATE {'progress' if name == 'heartbeat' else 'run'} SET {name} = ?", (value,))
    db.close()


def test_status_comes_from_lock_and_heartbeat(tmp_path: Path) -> None:
    folder, now, long_ago = tmp_path / "a", time.time(), time.time() - 2 * SILENT_SECONDS
    store = RunStore(folder, CONFIG)
    until(lambda: summarize(folder).progress)
    assert (summarize(folder).status, summarize(folder).silent_since) == ("running", None)
    store.close()

    as_recorded(folder, status="running", heartbeat=now)
    assert summarize(folder).status == "died", "on this machine the lock went with its process"
    written_on(folder, "another-kernel/1")
    as_recorded(folder, heartbeat=time.time())
    assert (summarize(folder).status, summarize(folder).silent_since) == ("running", None), "whatever it is called"
    as_recorded(folder, heartbeat=long_ago)
    assert (summarize(folder).status, summarize(folder).silent_since) == ("unknown", long_ago)
    as_recorded(folder, status="finished")
    assert (summarize(folder).status, summarize(folder).silent_since) == ("finished", None)


def written_on(folder: Path, machine: str | None) -> None:
    """Change on which machine the run was written; None = by a version that did not say it."""
    owner = {"pid": 1, "host": socket.gethostname()} | ({} if machine is None else {"machine": machine})
    (folder / "run.lock").write_text(json.dumps(owner))


def test_which_machine_wrote_a_run_is_its_kernels_word_not_a_names(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    store = RunStore(folder, CONFIG)
    until(lambda: summarize(folder).progress)
    store.close()
    as_recorded(folder, status="running", host="a-container", heartbeat=time.time())
    assert summarize(folder).status == "died"
    written_on(folder, machine_id().partition("/")[0] + "/another-shared-memory")
    assert summarize(folder).status == "died", "a container's locks are its machine's"
    written_on(folder, "another-kernel/1")
    assert summarize(folder).status == "running"


def test_a_machine_that_was_booted_again_ended_what_ran_on_it(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    store = RunStore(folder, CONFIG)
    until(lambda: summarize(folder).progress)
    store.close()
    written_on(folder, "the-kernel-before/1")
    as_recorded(folder, status="running", heartbeat=booted() - 100)
    assert summarize(folder).status == "died"
    as_recorded(folder, heartbeat=booted() + 1)
    assert summarize(folder).status in ("running", "unknown"), "another machine of that name"
    as_recorded(folder, host="elsewhere", heartbeat=booted() - 100)
    assert summarize(folder).status == "unknown"


@pytest.mark.parametrize("lock", [None, "", "[]"])
def test_runs_of_older_versions_know_their_machine_by_its_name(tmp_path: Path, lock: str | None) -> None:
    folder = tmp_path / "a"
    store = RunStore(folder, CONFIG)
    until(lambda: summarize(folder).progress)
    store.close()
    if lock is None:
        written_on(folder, None)
    else:
        (folder / "run.lock").write_text(lock)
    as_recorded(folder, status="running", heartbeat=time.time())
    assert summarize(folder).status == "died"
    as_recorded(folder, host="elsewhere")
    assert summarize(folder).status == "running"


STOPPED = """
    import pathlib, sys, time
    from mrl.config import OrchestratorConfig
    from mrl.store.run import RunStore
    RunStore(pathlib.Path(sys.argv[1]), OrchestratorConfig())
    print("ready", flush=True)
    time.sleep(300)
"""


def test_a_run_that_is_stuck_runs_without_a_sign_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process is stopped and holds the lock."""
    folder = tmp_path / "a"
    command = [sys.executable, "-c", textwrap.dedent(STOPPED), str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        until(lambda: summarize(folder).progress)
        os.kill(process.pid, 19)
        monkeypatch.setattr("mrl.store.find.SILENT_SECONDS", 0.0)
        summary = summarize(folder)
        process.kill()
    assert summary.progress is not None
    assert (summary.status, summary.silent_since) == ("running", summary.progress["heartbeat"])
    assert summarize(folder).status == "died"


def test_a_store_from_before_progress_is_read_and_gone_on_with(make_run: Callable[..., Path]) -> None:
    folder = make_run()
    with sqlite3.connect(folder / "run.db") as db:
        for index in ("truncated", "by_version", "by_tokens", "by_advantage"):
            db.execute(f"DROP INDEX rollouts_{index}")
        db.execute("ALTER TABLE rollouts DROP COLUMN policy_version")
        db.execute("DROP TABLE progress")
        db.execute("PRAGMA user_version = 1")
    db.close()
    with RunReader(folder) as reader:
        assert reader.progress() is None
        assert reader.last_step() == 6
        assert reader.page(order="tokens", limit=1).rows[0]["policy_version"] is None
        with pytest.raises(StoreError, match="policy_version: this run was recorded by an older mrl"):
            reader.page(Filter(policy_version=3))
    assert summarize(folder).status == "finished"
    store = RunStore.reopen(folder)
    with RunReader(folder) as reader:
        assert until(reader.progress)["stage"] == "starting"
    store.close()
    with sqlite3.connect(folder / "run.db") as db:
        assert db.execute("PRAGMA user_version").fetchone() == (VERSION,)
        (table,) = db.execute("SELECT sql FROM sqlite_schema WHERE name = 'progress'").fetchone()
        assert table in PROGRESS
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    db.close()
