"""The actor's processes under torchrun: started by the backend `inline`, or there with it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from mrl.backends import Resources, WorkerHandle
from mrl.backends.inline import InlineBackend
from mrl.backends.ranks import Ranks
from mrl.errors import ConfigError, WorkerDied
from mrl.system.gather import all_of
from tests.backends.workers import Worker

pytestmark = pytest.mark.slow


@pytest.fixture
async def backend() -> AsyncIterator[InlineBackend]:
    made = InlineBackend(60.0)
    yield made
    await made.close()


async def spawn(backend: InlineBackend, ranks: int) -> list[WorkerHandle]:
    places = [Resources(env={"RANK": str(rank), "WORLD_SIZE": str(ranks)}) for rank in range(ranks)]
    return await all_of(
        [backend.spawn(Worker, name=f"actor-{rank}", resources=place, args={}) for rank, place in enumerate(places)]
    )


async def test_ranks_are_processes_that_know_their_place_and_leave_none_behind(backend: InlineBackend) -> None:
    ranks = await spawn(backend, 2)
    pids = [await rank.call("pid") for rank in ranks]
    assert len({*pids, os.getpid()}) == 3
    assert [await rank.call("environment", "RANK") for rank in ranks] == ["0", "1"]
    assert [await rank.call("environment", "LOCAL_RANK") for rank in ranks] == ["0", "1"]
    here = await backend.spawn(Worker, name="rollout-0", resources=Resources(), args={})
    assert await here.call("pid") == os.getpid()
    torchrun = backend.torchrun
    assert torchrun is not None
    assert torchrun.process is not None
    with socket.create_connection(("127.0.0.1", torchrun.listener.getsockname()[1])) as stranger:  # type: ignore[union-attr]
        stranger.sendall(b'{"secret": "guessed", "rank": 0}\n')
        assert await asyncio.to_thread(stranger.recv, 1) == b""
    actor = Ranks("actor", ranks)
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(WorkerDied, match=r"actor, rank 1 of 2: actor-1: its process died during sleep\(\)"):
        await actor.call("sleep", 60)
    await backend.close()
    assert torchrun.process.returncode is not None
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_what_torchrun_cannot_start_is_told(backend: InlineBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(WorkerDied, match="torchrun ended with exit code 1 before process 0 was there"):
        await spawn(backend, 2)


PROGRAM = """
import asyncio, os, sys
sys.path.insert(0, {tests!r})
from mrl.backends.inline import InlineBackend
from mrl.backends.torchrun import take_part
from tests.backends.test_torchrun import spawn

take_part()
async def main():
    if sys.argv[1] == "trains":
        backend = InlineBackend(60.0)
        ranks = await spawn(backend, 2)
        print("ranks", *[await rank.call("environment", "RANK") for rank in ranks], flush=True)
        await backend.close()
    print("done", os.environ["RANK"], flush=True)
asyncio.run(main())
"""


@pytest.mark.parametrize("what", ["trains", "ends before"])
def test_a_program_started_by_torchrun_runs_once(what: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(tests=str(Path(__file__).parents[2])))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", str(program), what]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split("\n")[:-1] == (["ranks 0 1"] if what == "trains" else []) + ["done 0"]


def test_another_number_of_processes_than_torchrun_has_started_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Resources(env={"RANK": "0", "WORLD_SIZE": "2"})
    InlineBackend.check([place])
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=r"actor_gpu: 2 processes are to train, and torchrun has started 4"):
        InlineBackend.check([place])
