"""`mrl runs`, as a user meets it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from mrl.cli.runs import runs
from mrl.config import OrchestratorConfig
from mrl.errors import ConfigError, MRLError, StoreError
from mrl.store.progress import Progress, WorkerHealth
from mrl.store.run import RunStore, read_rows


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MRL_RUNS", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_list(
    make_run: Callable[..., Path], root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert runs([]) == 0
    assert "no runs" in capsys.readouterr().err
    make_run("first", steps=4)
    make_run("broken")
    (root / "broken" / "run.db").write_bytes(b"")
    store = RunStore(root / "open", OrchestratorConfig())
    assert runs(["--json"]) == 0
    listed = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(listed) == ["first", "broken", "open"]
    assert [row["status"] for row in listed.values()] == ["finished", "unreadable", "running"]
    first = listed["first"]
    assert (first["steps"], first["reward"], first["best_eval"], first["best_eval_step"]) == (4, 0.4, 0.2, 4)
    assert runs(["list"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].split() == ["run", "status", "steps", "last", "reward", "best", "eval", "age", "size"]
    assert "0.200 (step 4)" in out
    monkeypatch.setattr("mrl.store.find.SILENT_SECONDS", -1.0)
    assert runs([]) == 0
    assert "running, no sign of life since " in capsys.readouterr().out
    store.close()


def test_show(make_run: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run("first", failed=1)
    for name in ("first", str(folder)):
        assert runs(["show", name, "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert shown["metrics"] == {"reward/mean": 0.6, "train/loss": 0.5}
        assert [row["step"] for row in shown["evals"]] == [2, 4, 6]
        assert (shown["rollouts"], shown["failed_rollouts"]) == ({"train": 24, "eval": 3}, {"train": 6, "eval": 0})
        assert shown["config"]["training"]["seed"] == 42
    assert runs(["show", "first"]) == 0
    assert "24 of training, 3 of evaluations" in capsys.readouterr().out


def test_show_says_what_a_run_is_doing(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = RunStore(root / "open", OrchestratorConfig())
    workers = [WorkerHealth("rollout-0", True, 12, 1), WorkerHealth("actor", alive=False)]
    store.report(Progress(13, "generating", time.time() - 200, 3, 8, 12_345, 20, workers))
    deadline = time.monotonic() + 60
    doing = "step 13: generating for 3 min, 3 of 8 groups, 12,345 tokens, 20 attempts in flight"
    shown = ""
    while doing not in shown:
        assert time.monotonic() < deadline, shown
        assert runs(["show", "open"]) == 0
        shown = capsys.readouterr().out
    assert "rollout-0 (weights of version 12, replaced 1 time), actor (does not answer)" in shown
    store.finish("finished")
    store.close()
    assert runs(["show", "open"]) == 0
    assert "doing" not in capsys.readouterr().out


def test_compare(make_run: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    make_run("a", steps=4)
    make_run("b", steps=6, learning_rate=0.5)
    assert runs(["compare", "a", "b", "--json"]) == 0
    compared = json.loads(capsys.readouterr().out)
    assert compared["options"] == {"learning_rate": [5e-6, 0.5]}
    assert compared["metrics"]["steps"] == [4, 6]
    assert compared["metrics"]["reward/mean"] == pytest.approx([0.25, 0.35])
    assert compared["metrics"]["eval/mean"] == pytest.approx([0.2, 0.3])
    assert runs(["compare", "a", "b"]) == 0
    assert "learning_rate" in capsys.readouterr().out


def test_rollouts(make_run: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    make_run("a", failed=1)
    assert runs(["rollouts", "a", "--step", "3", "--task", "t1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["id"] for row in found] == ["3-1-1", "3-1-0"]
    assert found[0]["samples"][0]["completion_ids"] == [3, 5, 300]
    assert runs(["rollouts", "a", "--failed", "--limit", "2"]) == 0
    captured = capsys.readouterr()
    assert captured.out.count("error: SandboxError: it broke") == 2
    assert "there are more" in captured.err
    assert runs(["rollouts", "a", "--eval", "--min-reward", "0.06"]) == 0
    assert capsys.readouterr().out.startswith("── step 6 · e0 · attempt 0 · reward 0.06 · 3 tokens")


def test_export(make_run: Callable[..., Path], root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run("a", failed=1)
    wanted = [*read_rows(folder, "rollouts"), *read_rows(folder, "eval_rollouts")]
    assert runs(["export", "a", "--format", "jsonl", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"output": "a-rollouts.jsonl", "rows": 27}
    assert [json.loads(line) for line in (root / "a-rollouts.jsonl").read_text().splitlines()] == wanted
    assert runs(["export", "a", "--format", "parquet", "--output", "a.parquet"]) == 0
    table = pq.read_table(root / "a.parquet").to_pylist()
    assert len(table) == 27
    for row, rollout in zip(table, wanted, strict=True):
        for name in ("split", "step", "id", "task_id", "reward", "status", "error", "advantage", "tokens"):
            assert row[name] == rollout[name]
        assert row["messages"] == [{**message, "extra": None} for message in rollout["messages"]]
        filled = [{"policy_version": [sample["policy_version"]], "media": None} for sample in rollout["samples"]]
        assert row["samples"] == [sample | more for sample, more in zip(rollout["samples"], filled, strict=True)]
        assert json.loads(row["rewards"]) == rollout["rewards"]
    for rows, count in (("metrics", 6 * 2 + 3), ("events", 6)):
        assert runs(["export", "a", "--format", "parquet", "--rows", rows]) == 0
        assert pq.read_table(root / f"a-{rows}.parquet").num_rows == count
    capsys.readouterr()
    assert runs(["export", "a", "--format", "jsonl", "--rows", "metrics", "--output", "-"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 9
    assert sorted(path.name for path in root.glob("*.partial")) == []


def test_delete(make_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run("a")
    with pytest.raises(ConfigError, match="--yes"):
        runs(["delete", "a"])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda _: "n")
    assert runs(["delete", "a"]) == 1
    store = RunStore.reopen(folder)
    with pytest.raises(StoreError, match="is being written by process"):
        runs(["delete", "a", "--yes"])
    store.close()
    assert folder.exists()
    monkeypatch.setattr("builtins.input", lambda _: "y")
    assert runs(["delete", "a"]) == 0
    assert not folder.exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["shwo", "a"], "did you mean `mrl runs show`"),
        (["show", "firts"], "did you mean 'first'"),
        (["compare", "first"], "at least two"),
        (["rollouts", "first", "--limit", "0"], "limit: 0"),
        (["export", "first", "--format", "parquet", "--output", "-"], "name a file"),
        (["export", "first", "--format", "jsonl", "--output", "first"], "first exists"),
        (["export", "first", "--format", "jsonl", "--output", "no/such/folder"], "cannot be written"),
    ],
)
def test_mistakes_end_with_a_message(argv: list[str], message: str, make_run: Callable[..., Path]) -> None:
    make_run("first", steps=1)
    with pytest.raises(MRLError, match=message):
        runs(argv)


@pytest.mark.slow
def test_export_keeps_a_chunk_in_memory(root: Path) -> None:
    """A million tokens, over 60 MB as Python objects, cost no more than 24 MB of memory."""
    code = """
import resource, sys
import pyarrow.parquet
from pathlib import Path
from mrl.config import OrchestratorConfig
from mrl.store.export import export
from mrl.store.run import RunStore
from mrl.types import Group, Rollout, Sample, Task
folder = Path("big")
store = RunStore(folder, OrchestratorConfig())
for step in range(80):
    sample = Sample([], list(range(step, step + 2000)), [-0.5] * 2000, [1] * 2000, 0)
    store.write_step(step, {}, [Group(Task("t", ""), [Rollout(str(i), "t", i, [], [sample]) for i in range(8)])])
store.close()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert export(folder, "big.jsonl", "jsonl") == 640
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert (root / "big.jsonl").stat().st_size > 10e6
    assert int(done.stdout) < 24_000
