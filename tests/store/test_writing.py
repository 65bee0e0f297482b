"""One writer: replaced and not doubled, refused and not raced, failing aloud, whole after any kill."""

from __future__ import annotations

import os
import random
import signal
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
from mrl.errors import ConfigError, StoreError
from mrl.store.find import summarize
from mrl.store.read import RunReader
from mrl.store.run import RunStore, read_rows
from mrl.store.schema import open_writer

CONFIG = OrchestratorConfig()


def contents(run: Path) -> dict[str, Any]:
    """All there is, but for times and keys."""
    rows = {name: list(read_rows(run, name)) for name in ("metrics", "rollouts", "eval_metrics", "eval_rollouts")}
    for row in (row for some in rows.values() for row in some):
        row.pop("time", None)
        row.pop("key", None)
    return rows | {"events": [(e["kind"], e["message"], e.get("step")) for e in read_rows(run, "events")]}


def write(store: RunStore, make_groups: Any, steps: range, tag: str = "") -> None:
    for step in steps:
        store.write_step(step, {"reward/mean": float(step), f"m{tag}": 1.0}, make_groups(step))
        store.write_eval(step, {"eval/mean": float(step)}, make_groups(step, tasks=1))
        store.event("note", f"{step}{tag}", step=step)


def test_a_step_trained_again_is_replaced(tmp_path: Path, make_groups: Any) -> None:
    store = RunStore(tmp_path / "a", CONFIG)
    store.write_eval(0, {"eval/mean": 0.5}, make_groups(0))
    write(store, make_groups, range(1, 4), "old")
    store.write_step(2, {"reward/mean": 2.5}, make_groups(2, attempts=5))
    store.write_eval(0, {"eval/mean": 0.75}, make_groups(0, attempts=1))
    store.close()
    with RunReader(tmp_path / "a") as reader:
        assert [(s["step"], s["rollouts"]) for s in reader.steps()] == [(1, 4), (2, 10), (3, 4)]
        assert reader.metrics(2) == {"reward/mean": 2.5}
        assert reader.metrics(0, "eval") == {"eval/mean": 0.75}
        rows = list(reader.rollouts())
    assert [row["step"] for row in rows] == [1] * 4 + [2] * 10 + [3] * 4
    assert len(list(read_rows(tmp_path / "a", "eval_rollouts"))) == 2 + 3 * 2


def test_rewound_and_done_again_equals_done_once(tmp_path: Path, make_groups: Any) -> None:
    store = RunStore(tmp_path / "once", CONFIG)
    write(store, make_groups, range(1, 6))
    store.close()
    store = RunStore(tmp_path / "again", CONFIG)
    write(store, make_groups, range(1, 4))
    write(store, make_groups, range(4, 8), "wrong")
    store.close()
    store = RunStore.reopen(tmp_path / "again")
    store.rewind(3)
    assert [row["step"] for row in read_rows(tmp_path / "again", "metrics")] == [1, 2, 3]
    write(store, make_groups, range(4, 6))
    store.close()
    assert contents(tmp_path / "again") == contents(tmp_path / "once")
    with open_writer(tmp_path / "again") as db:
        assert db.execute("SELECT count(*) FROM contents").fetchone() == (5 * 6,)
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert db.execute("PRAGMA foreign_key_check").fetchall() == []


def test_rewind_to_before_the_beginning_leaves_nothing(tmp_path: Path, make_groups: Any) -> None:
    store = RunStore(tmp_path / "a", CONFIG)
    store.write_eval(0, {"eval/mean": 0.5}, make_groups(0))
    write(store, make_groups, range(1, 3))
    store.rewind(-1)
    store.close()
    assert not any(contents(tmp_path / "a").values())


def test_status_follows_the_run(tmp_path: Path, make_groups: Any) -> None:
    folder = tmp_path / "a"
    store = RunStore(folder, CONFIG)
    assert summarize(folder).status == "running"
    assert summarize(folder).pid == os.getpid()
    store.close()
    assert summarize(folder).status == "interrupted"
    store = RunStore.reopen(folder)
    assert (summarize(folder).status, summarize(folder).resumes) == ("running", 1)
    store.finish("failed", "TrainingError: too many")
    store.close()
    assert (summarize(folder).status, summarize(folder).error) == ("failed", "TrainingError: too many")
    store = RunStore.reopen(folder)
    store.finish("finished")
    store.close()
    store.close()
    assert (summarize(folder).status, summarize(folder).error, summarize(folder).resumes) == ("finished", None, 2)


def test_a_second_writer_is_refused_and_told_whom_to_ask(tmp_path: Path) -> None:
    store = RunStore(tmp_path / "a", CONFIG)
    code = "import sys, pathlib; from mrl.store.run import RunStore; RunStore.reopen(pathlib.Path(sys.argv[1]))"
    other = subprocess.run([sys.executable, "-c", code, str(tmp_path / "a")], capture_output=True, text=True)
    assert f"is being written by process {os.getpid()}" in other.stderr
    with pytest.raises(StoreError, match=f"process {os.getpid()}"):
        RunStore.reopen(tmp_path / "a")
    with pytest.raises(ConfigError, match="already holds a run"):
        RunStore(tmp_path / "a", CONFIG)
    store.close()
    RunStore.reopen(tmp_path / "a").close()


def test_a_forked_child_does_not_keep_the_run_locked(tmp_path: Path) -> None:
    code = """
        import os, pathlib, signal, sys, time
        from mrl.config import OrchestratorConfig
        from mrl.store.run import RunStore
        RunStore(pathlib.Path(sys.argv[1]), OrchestratorConfig())
        child = os.fork()
        if child == 0:
            os.close(1)
            time.sleep(60)
        print(child, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code), str(tmp_path / "a")]
    child = int(subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout)
    try:
        assert summarize(tmp_path / "a").status == "died"
        RunStore.reopen(tmp_path / "a").close()
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_process_that_forgets_to_close_loses_nothing(tmp_path: Path) -> None:
    code = """
        import pathlib, sys
        from mrl.config import OrchestratorConfig
        from mrl.store.run import RunStore
        store = RunStore(pathlib.Path(sys.argv[1]), OrchestratorConfig())
        for step in range(50):
            store.write_step(step, {"a": 1.0}, [])
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "a")], check=True)
    assert len(list(read_rows(tmp_path / "a", "metrics"))) == 50
    assert summarize(tmp_path / "a").status == "interrupted"


# --- trouble ----------------------------------------------------------------------------------------------------------


def test_what_cannot_be_written_is_raised_once_more_than_never(tmp_path: Path, make_groups: Any) -> None:
    store = RunStore(tmp_path / "a", CONFIG)
    store.write_step(1, {"a": 1.0}, make_groups(1))
    groups = make_groups(2)
    groups[1].rollouts[1].samples[0].completion_ids = ["no", "token", "ids"]
    store.write_step(2, {"a": 1.0}, groups)
    with pytest.raises(StoreError, match=r"run store .*run\.db could not be written"):
        store.flush()
    with pytest.raises(StoreError):
        store.write_step(3, {}, [])
    store.close()
    assert [row["step"] for row in read_rows(tmp_path / "a", "metrics")] == [1]  # nothing of step 2
    assert len(list(read_rows(tmp_path / "a", "rollouts"))) == 4


def test_close_raises_what_nobody_was_told(tmp_path: Path) -> None:
    store = RunStore(tmp_path / "a", CONFIG)
    store._writer.submit(lambda db: db.execute("no such SQL") and None)
    with pytest.raises(StoreError, match="syntax error"):
        store.close()
    store = RunStore.reopen(tmp_path / "a")  # it has let go of the run
    store.close()
    with pytest.raises(StoreError, match="is closed"):
        store.event("too", "late")


FULL_DISK = """
    import pathlib, resource, sys
    from mrl.config import OrchestratorConfig
    from mrl.errors import StoreError
    from mrl.store.run import RunStore
    from mrl.types import Group, Rollout, Task

    store = RunStore(pathlib.Path(sys.argv[1]), OrchestratorConfig())
    resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, 600_000))
    try:
        for step in range(1, 200):
            text = "".join(chr(33 + (i * i * step) % 90) for i in range(20_000))
            store.write_step(step, {"a": 1.0}, [Group(Task("t", text), [Rollout("r", "t", 0, [], [], prompt="")])])
    except StoreError as error:
        print(error)
        store.close()
        sys.exit(7)
"""


def test_a_full_disk_says_what_to_do_and_what_was_written_stays(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(FULL_DISK), str(tmp_path / "a")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 7, done.stderr
    assert "free space on that disk, then resume the run" in done.stdout
    steps = [row["step"] for row in read_rows(tmp_path / "a", "metrics")]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) > 5
    assert [row["step"] for row in read_rows(tmp_path / "a", "rollouts")] == steps


def test_a_slow_disk_slows_the_loop_and_does_not_fill_the_memory(tmp_path: Path) -> None:
    store = RunStore(tmp_path / "a", CONFIG)
    blocked = threading.Event()
    store._writer.submit(lambda db: blocked.wait(20) and None)
    done = threading.Thread(target=lambda: [store.event("e", str(i)) for i in range(100)])
    done.start()
    done.join(0.3)
    assert done.is_alive()
    assert store._writer._queue.qsize() <= 16
    blocked.set()
    done.join()
    store.close()
    assert [event["message"] for event in read_rows(tmp_path / "a", "events")] == [str(i) for i in range(100)]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=r"run_dir: .* cannot be written .*; choose another"):
        RunStore(tmp_path / "file" / "run", CONFIG)
    with pytest.raises(StoreError, match="holds no run"):
        RunStore.reopen(tmp_path / "nothing")


# --- killed -----------------------------------------------------------------------------------------------------------

KILLED = """
    import pathlib, sys
    from mrl.config import OrchestratorConfig
    from mrl.store.run import RunStore
    from mrl.types import Group, Rollout, Sample, Task

    folder = pathlib.Path(sys.argv[1])
    new = not (folder / "config.yaml").exists()
    store = RunStore(folder, OrchestratorConfig()) if new else RunStore.reopen(folder)
    print("ready", flush=True)
    step = int(sys.argv[2])
    while True:
        step += 1
        groups = [
            Group(Task(f"t{k}", "x" * 500), [
                Rollout("r", f"t{k}", i, [{"role": "user", "content": str(step)}],
                        [Sample([1], [step, k, i] * 300, [-0.5, -1.0, -2.0] * 300, [1] * 900, step)])
                for i in range(8)])
            for k in range(4)
        ]
        store.write_step(step, {f"m{i}": float(step) for i in range(20)}, groups)
        store.event("step", str(step), step=step)
"""
KILLS = 24


FORKS = """
    import os, sys
    import mrl.store.run, mrl.store.rows  # all imports once: a kill takes milliseconds, not seconds
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            sys.argv = ["killed", *line.split()]
            exec(WORK, {"__name__": "killed"})
        print(child, flush=True)
        os.waitpid(child, 0)
        print("gone", flush=True)
"""


@pytest.mark.slow
def test_killed_at_any_moment_the_store_has_whole_steps_only(tmp_path: Path) -> None:
    folder, chance, done = tmp_path / "a", random.Random(0), 0
    code = textwrap.dedent(FORKS).replace("WORK", repr(textwrap.dedent(KILLED)))
    command = [sys.executable, "-u", "-W", "ignore", "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdin
        assert parent.stdout
        for kill in range(KILLS):
            parent.stdin.write(f"{folder} {done}\n")
            parent.stdin.flush()
            said = sorted(parent.stdout.readline().strip() for _ in range(2))  # the child's number, and "ready"
            time.sleep(chance.uniform(0, 0.2))
            os.kill(int(said[0]), signal.SIGKILL)
            assert parent.stdout.readline() == "gone\n"
            done = check_whole(folder, at_least=done, check_file=kill % 6 == 0)
        parent.stdin.close()
    assert done >= KILLS
    assert summarize(folder).status == "died"
    assert summarize(folder).resumes == KILLS - 1


def check_whole(folder: Path, at_least: int, check_file: bool) -> int:
    with RunReader(folder) as reader:  # a reader comes first, before any writer has repaired anything
        last = reader.last_step() or 0
        assert last >= at_least
        assert [step["step"] for step in reader.steps()] == list(range(1, last + 1))
        for name in ("m0", "m19"):
            assert reader.series(name) == [(step, float(step)) for step in range(1, last + 1)]
        for step in range(at_least + 1, last + 1):
            assert len(reader.metrics(step)) == 20
        if last:
            rows = [reader.rollout(row["key"]) for row in reader.page(limit=32, newest_first=True).rows]
            assert {row["step"] for row in rows} == {last}
            for row in rows:
                k = int(row["task_id"][1:])
                assert row["samples"][0]["completion_ids"] == [last, k, row["attempt"]] * 300
    if check_file:
        db = sqlite3.connect(folder / "run.db")
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        counts = db.execute("SELECT (SELECT count(*) FROM rollouts), (SELECT count(*) FROM contents)").fetchone()
        assert counts == (last * 32, last * 32)
        db.close()
    return last


def test_killed_while_the_folder_is_made_it_can_be_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    RunStore(folder, CONFIG).close()
    (folder / "config.yaml").unlink()  # the last file to appear
    (folder / "run.db.partial").write_bytes(b"half")
    RunStore(folder, CONFIG).close()
    assert summarize(folder).status == "interrupted"


def test_steps_whose_configuration_is_gone_are_not_written_over(make_run: Callable[..., Path]) -> None:
    folder = make_run()
    (folder / "config.yaml").unlink()
    with pytest.raises(ConfigError, match="already holds a run"):
        RunStore(folder, CONFIG)


def test_many_readers_while_one_writes(tmp_path: Path, make_groups: Any) -> None:
    folder = tmp_path / "a"
    store = RunStore(folder, CONFIG)
    stop, seen, errors = threading.Event(), [], []

    def read() -> None:
        try:
            while not stop.is_set():
                with RunReader(folder) as reader:
                    page = reader.page(limit=12, newest_first=True)
                    assert len(page.rows) % 4 == 0
                    assert [row["attempt"] for row in page.rows] == [1, 0] * (len(page.rows) // 2)
                    seen.append(len(reader.series("reward/mean")))
        except BaseException as error:
            errors.append(error)

    readers = [threading.Thread(target=read) for _ in range(6)]
    for reader in readers:
        reader.start()
    for step in range(1, 60):
        store.write_step(step, {"reward/mean": 1.0}, make_groups(step))
        if step % 20 == 0:
            store.rewind(step - 10)
        time.sleep(0.005)
    stop.set()
    for reader in readers:
        reader.join()
    store.close()
    assert not errors
    assert len(set(seen)) > 5


def test_the_loop_does_not_wait_for_the_disk(tmp_path: Path, make_groups: Any) -> None:
    """Handing over 1,024 rollouts takes under 10 ms, 1 % of a step of one second."""
    store = RunStore(tmp_path / "a", CONFIG)
    groups, times = make_groups(1, tasks=128, attempts=8), []
    for step in range(1, 6):
        start = time.perf_counter()
        store.write_step(step, {f"m{i}": 1.0 for i in range(50)}, groups)
        times.append(time.perf_counter() - start)
        store.flush()
    store.close()
    assert min(times) < 0.01
