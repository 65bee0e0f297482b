"""Pages against the same rows filtered and sorted in Python; versions that are not ours."""

from __future__ import annotations

import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mrl.store.filters
from mrl.config import OrchestratorConfig
from mrl.errors import StoreError
from mrl.store.filters import Filter
from mrl.store.read import RunReader
from mrl.store.run import RunStore, read_rows
from mrl.types import Group, Rollout, Sample, Task

REWARDS = (0.0, 0.25, 0.5, 1.0, float("inf"), float("nan"), None)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps of uneven size, some replaced afterwards, with every kind of reward."""
    folder, chance = tmp_path_factory.mktemp("mixed") / "run", random.Random(0)
    store = RunStore(folder, OrchestratorConfig())
    for step in [*range(40), *(chance.randrange(40) for _ in range(10))]:
        groups = []
        for k in chance.sample(range(6), chance.randrange(4)):
            task = Task(f"t{k}", "x" * chance.randrange(2))
            rollouts = [
                Rollout(
                    *(f"{step}-{k}-{i}", task.id, i, [], some_samples(chance)),
                    reward=chance.choice(REWARDS),
                    advantage=chance.choice((None, -1.0, 0.5)),
                )
                for i in range(chance.randrange(5))
            ]
            for rollout in rollouts:
                if chance.random() < 0.2:
                    rollout.fail("no")
            groups.append(Group(task, rollouts))
        (store.write_eval if chance.random() < 0.3 else store.write_step)(step, {"m": float(step)}, groups)
    store.close()
    return folder


def some_samples(chance: random.Random) -> list[Sample]:
    count = chance.randrange(3)
    versions = chance.choice((1, 2, [1, 3][:count]))
    reason: Any = chance.choice(("stop", "length"))
    return [Sample([1], [2] * count, [-1.0] * count, [1] * count, versions, reason)] * chance.randrange(2)


FILTERS = st.builds(
    Filter,
    split=st.sampled_from(["train", "eval"]),
    step=st.none() | st.integers(0, 41),
    task_id=st.none() | st.sampled_from([f"t{k}" for k in range(7)]),
    status=st.sampled_from([None, "ok", "failed"]),
    reward_min=st.sampled_from([None, None, 0.0, 0.3, 1.0, 2.0]),
    reward_max=st.sampled_from([None, None, 0.0, 0.5, 1.0]),
    truncated=st.sampled_from([None, None, True, False]),
    policy_version=st.sampled_from([None, None, 1, 2, 3]),
)


def lets_through(where: Filter, row: dict[str, Any]) -> bool:
    reward = row["reward"]
    return (
        where.step in (None, row["step"])
        and where.task_id in (None, row["task_id"])
        and where.status in (None, row["status"])
        and (where.reward_min is None or (reward is not None and reward >= where.reward_min))
        and (where.reward_max is None or (reward is not None and reward <= where.reward_max))
        and where.truncated in (None, row["finish_reason"] == "length")
        and where.policy_version in (None, row["policy_version"])
    )


@settings(max_examples=75, deadline=None)
@given(where=FILTERS, size=st.integers(1, 30), offset=st.integers(0, 60), newest=st.booleans(), few=st.booleans())
def test_pages_are_what_filtering_everything_gives(
    mixed: Path, where: Filter, size: int, offset: int, newest: bool, few: bool
) -> None:
    """`few` makes the reader take its other way for ranges of rewards."""
    mrl.store.filters.FEW, before = (1000 if few else -1), mrl.store.filters.FEW
    try:
        with RunReader(mixed) as reader:
            everything = list(reader.rollouts(Filter(where.split)))
            wanted = [row["key"] for row in everything if lets_through(where, row)]
            assert reader.count(where) == len(wanted)
            if newest:
                wanted.reverse()
            assert [row["key"] for row in reader.rollouts(where, newest)] == wanted
            page, found = reader.page(where, limit=size, offset=offset, newest_first=newest), []
            while True:
                found += [row["key"] for row in page.rows]
                if page.next is None:
                    break
                assert len(page.rows) == size
                page = reader.page(where, limit=size, after=page.next, newest_first=newest)
            assert found == wanted[offset:]
    finally:
        mrl.store.filters.FEW = before


@settings(max_examples=75, deadline=None)
@given(where=FILTERS, order=st.sampled_from(["reward", "tokens", "advantage"]), highest=st.booleans())
def test_pages_in_other_orders(mixed: Path, where: Filter, order: Any, highest: bool) -> None:
    with RunReader(mixed) as reader:
        rows = [row for row in reader.rollouts(Filter(where.split)) if lets_through(where, row)]
        wanted = [row for row in rows if row[order] is not None and row[order] == row[order]]
        wanted.sort(key=lambda row: (row[order], row["step"], row["key"]), reverse=highest)
        found, after = [], None
        while True:
            page = reader.page(where, limit=7, after=after, newest_first=highest, order=order)
            found += page.rows
            if (after := page.next) is None:
                break
        assert [row["key"] for row in found] == [row["key"] for row in wanted]


def test_metrics_tasks_and_events(make_run: Callable[..., Path]) -> None:
    with RunReader(make_run(failed=1)) as reader:
        assert reader.series("reward/mean") == [(step, step / 10) for step in range(1, 7)]
        assert reader.series("eval/mean", "eval") == [(2, 0.1), (4, 0.2), (6, 0.3)]
        assert reader.series("eval/mean") == []
        assert reader.metric_names() == ["reward/mean", "train/loss"]
        assert reader.metric_names("eval") == ["eval/mean"]
        assert reader.last_step() == 6
        assert reader.count(Filter(status="failed")) == 6
        tasks = reader.tasks()
        assert [(t["id"], t["rollouts"], t["failed"]) for t in tasks] == [("e0", 3, 0), ("t0", 12, 6), ("t1", 12, 0)]
        assert tasks[1]["reward"] == pytest.approx(sum(s + 1 for s in range(1, 7)) / 600)
        assert (tasks[1]["prompt"], tasks[1]["columns"]) == ("say 0", {"gold": 0})
        assert [t["id"] for t in reader.tasks(limit=1, after="e0")] == ["t0"]
        assert [(e["kind"], e["step"]) for e in reader.events("checkpoint")] == [("checkpoint", s) for s in range(1, 7)]
        assert reader.events(after=4, limit=1)[0]["message"] == "step 5"
        with pytest.raises(StoreError, match="no rollout 999"):
            reader.rollout(999)


def test_rows_of_a_page_and_in_full_agree(make_run: Callable[..., Path]) -> None:
    with RunReader(make_run()) as reader:
        for row in reader.page(limit=10).rows:
            full = reader.rollout(row["key"])
            assert {name: full[name] for name in row} == row
            assert full["tokens"] == len(full["samples"][0]["completion_ids"]) == 3


def test_pages_of_any_filter_use_an_index(mixed: Path) -> None:
    """No full scan of rollouts, and nothing sorted but ranges of rewards, and other orders of few rows."""
    plans = []
    with RunReader(mixed) as reader:
        reader._connection.set_trace_callback(plans.append)
        for newest in (False, True):
            filters = (Filter(), Filter(step=3), Filter(task_id="t1"), Filter(status="failed"), Filter(status="ok"))
            for where in (*filters, Filter(truncated=True), Filter(policy_version=2)):
                page = reader.page(where, limit=2, newest_first=newest)
                if page.next:
                    reader.page(where, after=page.next, newest_first=newest)
            for order in ("reward", "tokens", "advantage"):
                page = reader.page(limit=2, newest_first=newest, order=order)  # type: ignore[arg-type]
                reader.page(after=page.next, newest_first=newest, order=order)  # type: ignore[arg-type]
        reader._connection.set_trace_callback(None)
        for sql in plans:
            if sql.lstrip().startswith("SELECT r.step_id"):
                plan = " ".join(row["detail"] for row in reader._all(f"EXPLAIN QUERY PLAN {sql}"))
                assert "SCAN r" not in plan.replace("COVERING ", "").replace("SCAN r USING INDEX rollouts_by_", ""), (
                    plan,
                    sql,
                )
                assert "TEMP B-TREE" not in plan or "task_key IN (" in sql.replace("\n", " "), (plan, sql)


def test_another_order_of_few_rewards_reads_no_others(mixed: Path) -> None:
    """Walking everything in the order of tokens would look at a million rollouts to find none."""
    plans: list[str] = []
    with RunReader(mixed) as reader:
        reader._connection.set_trace_callback(plans.append)
        assert reader.page(Filter(reward_min=5.5, reward_max=5.75), order="tokens").rows == []
        reader._connection.set_trace_callback(None)
        (sql,) = (sql for sql in plans if "r.tokens" in sql)
        (row, *_) = reader._all(f"EXPLAIN QUERY PLAN {sql}")
        assert "rollouts_by_reward" in row["detail"]


def test_a_folder_that_cannot_be_written_is_read(make_run: Callable[..., Path]) -> None:
    code = """
import os, sys
from pathlib import Path
from mrl.store.read import RunReader
if os.getuid() == 0:
    os.setuid(65534)
assert not os.access(sys.argv[1], os.W_OK)
with RunReader(Path(sys.argv[1])) as reader:
    print(reader.last_step())
"""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        shutil.copytree(make_run(), folder)
        Path(name).chmod(0o755)
        folder.chmod(0o555)
        done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True)
        folder.chmod(0o755)
    assert done.stdout == "6\n", done.stderr


# --- versions ---------------------------------------------------------------------------------------------------------


def test_a_newer_store_is_refused(make_run: Callable[..., Path]) -> None:
    folder = make_run()
    with sqlite3.connect(folder / "run.db") as db:
        db.execute("PRAGMA user_version = 9")
    for use in (RunReader, RunStore.reopen):
        with pytest.raises(StoreError, match=r"newer mrl \(store version 9.*pip install --upgrade mrl"):
            use(folder)


@pytest.mark.parametrize("content", [b"", b"not a database, and longer than its header would be" * 30])
def test_what_is_no_store_is_refused(make_run: Callable[..., Path], content: bytes) -> None:
    folder = make_run()
    (folder / "run.db").write_bytes(content)
    with pytest.raises(StoreError, match=r"run\.db (is not the record of a run|cannot be opened)"):
        RunReader(folder)


def test_an_older_store_is_refused(make_run: Callable[..., Path]) -> None:
    folder = make_run()
    with sqlite3.connect(folder / "run.db") as db:
        db.execute("PRAGMA user_version = 0")
    for use in (RunReader, RunStore.reopen, lambda f: list(read_rows(f, "metrics"))):
        with pytest.raises(StoreError, match=r"older mrl \(store version 0.*read it with that one"):
            use(folder)
