"""The tests' own backend: processes that share nothing, start at once, and can be killed."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator

import pytest

from mrl.backends import Resources
from mrl.errors import ConfigError, WorkerDied
from tests.backends.workers import Odd, Worker
from tests.process_backend import ProcessBackend

pytestmark = pytest.mark.slow


@pytest.fixture
async def backend() -> AsyncIterator[ProcessBackend]:
    made = ProcessBackend(60.0)
    yield made
    await made.close()


async def test_workers_live_in_processes_of_their_own(backend: ProcessBackend) -> None:
    workers = [
        await backend.spawn(Worker, name=f"w{i}", resources=Resources(env={"WHICH": str(i)}), args={}) for i in range(2)
    ]
    pids = [await worker.call("pid") for worker in workers]
    assert len({*pids, os.getpid()}) == 3
    assert [await worker.call("environment", "WHICH") for worker in workers] == ["0", "1"]
    assert "WHICH" not in os.environ


async def test_a_start_takes_well_under_a_second(backend: ProcessBackend) -> None:
    """The server that forks them has imported everything."""
    await backend.spawn(Worker, name="first", resources=Resources(), args={})
    start = time.monotonic()
    for i in range(5):
        await backend.spawn(Worker, name=f"w{i}", resources=Resources(), args={})
    assert time.monotonic() - start < 5


async def test_everything_travels_as_a_copy(backend: ProcessBackend) -> None:
    worker = await backend.spawn(Worker, name="w", resources=Resources(), args={})
    offset, value = 3, [1, 2]
    assert await worker.call("apply", lambda n: n + offset, 4) == 7
    returned = await worker.call("echo", value)
    assert returned == value
    assert returned is not value
    with pytest.raises(ConfigError, match=r"lock.* cannot be sent to a process of its own"):
        await worker.call("echo", threading.Lock())
    large = os.urandom(1 << 22)
    assert await worker.call("echo", large) == large
    with pytest.raises(RuntimeError, match="Odd: odd one"):
        await worker.call("fail_oddly")
    assert isinstance(Odd("a", "b"), Exception)
    with pytest.raises(WorkerDied, match="other: is gone") as raised:
        await worker.call("death")
    assert raised.value.worker == "other"


async def test_a_dead_process_is_noticed_at_once(backend: ProcessBackend) -> None:
    worker = await backend.spawn(Worker, name="w", resources=Resources(), args={})
    for method, arguments in (("wait", (60,)), ("sleep", (60,))):
        worker = await backend.spawn(Worker, name="w", resources=Resources(), args={})
        call = asyncio.create_task(worker.call(method, *arguments))
        await asyncio.sleep(0.05)
        os.kill(worker.pid, signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(WorkerDied, match=rf"w: its process died during {method}\(\)"):
            await call
        assert time.monotonic() - start < 1
        assert not await worker.alive()
        with pytest.raises(WorkerDied, match=r"its process died and cannot answer add\(\)"):
            await worker.call("add", 1)


async def test_a_stopped_process_misses_its_deadline(backend: ProcessBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mrl.backends.base.ENDING_SECONDS", 0.1)
    worker = await backend.spawn(Worker, name="w", resources=Resources(), args={})
    os.kill(worker.pid, signal.SIGSTOP)
    with pytest.raises(WorkerDied, match=r"w: add\(\) did not finish in 0 s"):
        await worker.call("add", 1, timeout=0.2)
    await worker.kill()
    assert not worker.process.is_alive()
