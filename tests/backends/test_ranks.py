"""Several workers behind one handle: real processes that add up with gloo."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from mrl.backends import Resources, base, ranks
from mrl.backends.ranks import Ranks
from mrl.errors import ConfigError, WorkerDied
from tests.backends.workers import Rank
from tests.process_backend import ProcessBackend

pytestmark = pytest.mark.slow

SOON = 10.0


@pytest.fixture
async def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Ranks]:
    monkeypatch.setattr(ranks, "FOLLOWING_SECONDS", 1.0)
    monkeypatch.setattr(base, "ENDING_SECONDS", 0.5)
    backend = ProcessBackend(60.0)
    handles = [
        await backend.spawn(
            Rank, name=f"actor-{rank}", resources=Resources(), args={"rank": rank, "world": 3, "store": f"{tmp_path}/s"}
        )
        for rank in range(3)
    ]
    group = Ranks("actor", handles)
    await group.call("join")
    yield group
    await backend.close()


async def test_every_rank_does_it_and_rank_0_answers(group: Ranks) -> None:
    assert await group.call("total", 1.0) == (0, 6.0)
    assert await group.call("total", number=2.0) == (0, 9.0)
    assert await group.alive()


async def test_a_rank_that_raises_fails_the_call_and_is_named(group: Ranks) -> None:
    with pytest.raises(ConfigError, match=r"^actor, rank \d of 3: number: is refused everywhere"):
        await group.call("refuse")
    assert await group.call("total", 1.0) == (0, 6.0), "what fails on all of them leaves them as they were"
    start = time.monotonic()
    with pytest.raises(ConfigError, match=r"^actor, rank 1 of 3: number: will not do"):
        await group.call("total", 1.0, fails=1)
    assert time.monotonic() - start < SOON
    assert not await group.alive(), "the others wait for it in the sum"
    with pytest.raises(WorkerDied, match=r"actor: rank 1 failed in total\(\)") as raised:
        await group.call("total", 1.0)
    assert raised.value.worker == "actor"


async def test_a_rank_that_dies_fails_the_call_and_is_named(group: Ranks) -> None:
    start = time.monotonic()
    with pytest.raises(WorkerDied, match=r"^actor, rank 2 of 3: actor-2: its process died") as raised:
        await group.call("total", 1.0, dies=2)
    assert time.monotonic() - start < SOON
    assert raised.value.worker == "actor"
    assert not await group.alive()


async def test_a_rank_that_died_between_calls(group: Ranks) -> None:
    os.kill(group.ranks[1].pid, signal.SIGKILL)
    with pytest.raises(WorkerDied, match="actor, rank 1 of 3"):
        await group.call("total", 1.0)
    assert not await group.alive()


async def test_a_deadline_is_every_ranks(group: Ranks) -> None:
    os.kill(group.ranks[1].pid, signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(WorkerDied, match=r"actor, rank \d of 3: .* did not finish in 0 s"):
        await group.call("total", 1.0, timeout=0.2)
    assert time.monotonic() - start < SOON
    assert not await group.alive()


async def test_kill_ends_all(group: Ranks) -> None:
    await group.kill()
    assert not any([await rank.alive() for rank in group.ranks])
    with pytest.raises(WorkerDied, match="actor: was ended"):
        await group.call("total", 1.0)
