"""What a judge keeps of its answers, and what they cost."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest

from mrl.errors import RewardError
from mrl.rewards.base import Scores
from mrl.rewards.judge import Judge
from mrl.workers.reward import RewardWorker
from tests.rewards.judge.asked import metric, rows, score
from tests.rewards.judge.server import JudgeServer


def test_answers_are_kept_by_content(server: JudgeServer, tmp_path: Path) -> None:
    options = server.options(cache=str(tmp_path / "c.db"))
    assert score(Judge(**options), rows("a", "aa")).values == [0.1, 0.2]
    again = score(Judge(**options), rows("aa", "aaa"))
    assert again.values == [0.2, 0.3]
    assert (metric(again, "cached_fraction"), metric(again, "requests"), metric(again, "prompt_tokens")) == (0.5, 1, 30)
    assert len(server.bodies) == 3
    for changed in ({"model": "other"}, {"temperature": 0.1}, {"rubric": "Other."}, {"params": {"top_p": 0.1}}):
        score(Judge(**(options | changed)), rows("a"))
    assert len(server.bodies) == 7
    assert score(Judge(**(options | {"normalize": False})), rows("a")).values == [1.0]  # read anew
    assert len(server.bodies) == 7


def test_the_same_at_the_same_time_is_asked_once(server: JudgeServer) -> None:
    judge = Judge(**server.options())

    async def twice() -> list[Scores]:
        both = await asyncio.gather(*(judge.score(rows("a", "a", "b"), trainer_state=None) for _ in range(2)))
        await judge.close()
        return both

    both = asyncio.run(twice())
    assert [scores.values for scores in both] == [[0.1] * 3] * 2
    assert len(server.bodies) == 2


def test_a_file_that_is_no_cache_is_refused(server: JudgeServer, tmp_path: Path) -> None:
    (tmp_path / "c.db").write_text("something else, which is long enough to be looked at" * 100)
    with pytest.raises(RewardError, match=r"c\.db cannot be used"):
        Judge(**server.options(cache=str(tmp_path / "c.db"))).open(None)


def test_a_file_that_breaks_later_ends_the_run_by_name(server: JudgeServer, tmp_path: Path) -> None:
    """Without it what is paid for would be neither kept nor counted."""
    judge = Judge(**server.options(cache=str(tmp_path / "c.db")))
    judge.open(None)
    with sqlite3.connect(tmp_path / "c.db") as database:
        database.execute("DROP TABLE answers")
    with pytest.raises(RewardError, match=r"c\.db cannot be used \(no such table: answers\)"):
        score(judge, rows("a"))


def test_the_worker_keeps_answers_in_the_runs_folder(server: JudgeServer, tmp_path: Path) -> None:
    async def ask() -> float | None:
        worker = RewardWorker([{"judge": server.options()}])
        worker.open(str(tmp_path))
        report = await worker.score(rows("aaa"))
        await worker.close()
        return report.results[0].reward

    assert [asyncio.run(ask()), asyncio.run(ask())] == [0.3, 0.3]
    assert len(server.bodies) == 1
    assert (tmp_path / "judge_cache.db").exists()


def test_max_cost_ends_asking_also_in_a_resumed_run(server: JudgeServer, tmp_path: Path) -> None:
    prices = {"prompt_price": 1000.0, "completion_price": 0.0, "max_cost": 0.05}
    options = server.options(cache=str(tmp_path / "c.db"), concurrency=1, **prices)
    scores = score(Judge(**options), rows("a", "aa", "aaa"))
    assert scores.values == [0.1, 0.2, None]
    assert "max_cost (0.05) is spent" in scores.errors[2]
    scores = score(Judge(**options), rows("a", "aaaa"))
    assert scores.values == [0.1, None]
