"""What every backend keeps, with real workers: calls, deadlines, cancellation, death, files."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from mrl import errors
from mrl.backends import Backend, Resources, WorkerHandle, base
from mrl.backends.inline import InlineBackend
from mrl.backends.modal import ModalBackend
from mrl.backends.ray import RayBackend
from mrl.errors import ConfigError, WorkerDied
from tests.backends.workers import Worker
from tests.process_backend import ProcessBackend

SOON = 10.0
"""Seconds that anything here takes at most: none of it hangs."""


ALL = {
    "inline": InlineBackend,
    "processes": pytest.param(ProcessBackend, marks=pytest.mark.slow),
    "ray": pytest.param(RayBackend, marks=pytest.mark.ray),
    "modal": pytest.param(ModalBackend, marks=pytest.mark.modal),
}
SHARING = {name: param for name, param in ALL.items() if name != "modal"}


async def made(request: pytest.FixtureRequest) -> AsyncIterator[Backend]:
    if request.param is RayBackend:
        request.getfixturevalue("ray_cluster")
    if request.param is ModalBackend:
        request.getfixturevalue("modal_account")
    backend: Backend = request.param(60.0)
    yield backend
    await backend.close()


@pytest.fixture(params=ALL.values(), ids=ALL.keys())
async def backend(request: pytest.FixtureRequest) -> AsyncIterator[Backend]:
    async for one in made(request):
        yield one


@pytest.fixture(params=SHARING.values(), ids=SHARING.keys())
async def sharing(request: pytest.FixtureRequest) -> AsyncIterator[Backend]:
    """One whose workers write to this machine's disk."""
    async for one in made(request):
        yield one


async def spawn(backend: Backend, **args: Any) -> WorkerHandle:
    return await backend.spawn(Worker, name="w", resources=Resources(), args=args)


async def until(log: Path, lines: list[str]) -> None:
    """Wait for a worker to have written this."""
    async with asyncio.timeout(SOON):
        while not log.exists() or log.read_text().split() != lines:
            await asyncio.sleep(0.005)


async def test_calls_reach_methods_of_both_kinds(backend: Backend) -> None:
    worker = await spawn(backend, start=1)
    assert await worker.call("add", 2) == 3
    assert await worker.call("add_async", n=4) == 7
    assert worker.name == "w"
    assert await worker.alive()


async def test_asynchronous_calls_run_side_by_side_and_blocking_ones_in_turn(backend: Backend) -> None:
    worker = await spawn(backend)
    async with asyncio.timeout(SOON):
        assert await asyncio.gather(*(worker.call("meet", 5) for _ in range(5))) == [5] * 5
    await asyncio.gather(*(worker.call("sleep", 0.01) for _ in range(5)))  # it asserts that none runs beside another
    assert await asyncio.gather(*(worker.call("add", 1) for _ in range(4))) == [6, 7, 8, 9]


async def test_what_a_method_raises_is_raised_here(backend: Backend) -> None:
    worker = await spawn(backend)
    with pytest.raises(ValueError, match="mine"):
        await worker.call("fail", ValueError("mine"))
    with pytest.raises(TimeoutError, match="mine"):
        await worker.call("fail", TimeoutError("mine"))
    with pytest.raises(Exception, match="odd one"):
        await worker.call("fail_oddly")
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        await worker.call("nothing_of_the_kind")
    with pytest.raises(ConfigError, match="start: is below 0"):
        await spawn(backend, start=-1)
    assert await worker.call("add", 1) == 1


@pytest.mark.parametrize("method", ["sleep", "wait"])
async def test_a_call_that_misses_its_deadline_is_a_death(backend: Backend, method: str) -> None:
    worker = await spawn(backend)
    with pytest.raises(WorkerDied, match=rf"w: {method}\(\) did not finish in 0 s") as raised:
        await worker.call(method, 0.5, timeout=0.05)
    assert raised.value.worker == "w"
    assert not await worker.alive()


async def test_cancelling_reaches_an_asynchronous_method(sharing: Backend, tmp_path: Path) -> None:
    log = tmp_path / "log"
    worker = await spawn(sharing, log=str(log))
    call = asyncio.create_task(worker.call("wait", 60))
    await until(log, ["began"])
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert log.read_text().split() == ["began", "cancelled"], "it had not ended when the call had"
    assert await worker.call("add", 1) == 1


async def test_a_blocking_method_keeps_its_place_until_it_has_returned(sharing: Backend, tmp_path: Path) -> None:
    log = tmp_path / "log"
    worker = await spawn(sharing, log=str(log))
    call, dropped = (asyncio.create_task(worker.call("sleep", 0.3)) for _ in range(2))
    await until(log, ["began"])
    for task in (call, dropped):
        task.cancel()
    for task in (call, dropped):
        with pytest.raises(asyncio.CancelledError):
            await task
    assert log.read_text().split() == ["began"]
    assert await worker.call("add_async", 1) == 1  # beside it
    assert log.read_text().split() == ["began"]
    assert await worker.call("add", 1) == 2  # after it, and without the one that had not begun
    assert log.read_text().split() == ["began", "ended"]


async def test_whoever_waits_for_a_worker_that_is_ended_is_told(backend: Backend) -> None:
    worker = await spawn(backend)
    calls = [asyncio.create_task(worker.call("wait", 60)) for _ in range(2)]
    await worker.call("add", 1)
    start = time.monotonic()
    await worker.kill()
    for call in calls:
        with pytest.raises(WorkerDied, match=r"w: was ended during wait\(\)"):
            await call
    assert time.monotonic() - start < SOON
    assert not await worker.alive()
    with pytest.raises(WorkerDied, match="was ended"):
        await worker.call("add", 1)
    await worker.kill()


async def test_a_worker_is_closed_when_it_is_ended(sharing: Backend, tmp_path: Path) -> None:
    await spawn(sharing, log=str(tmp_path / "log"))
    await sharing.close()
    assert (tmp_path / "log").read_text() == "closed\n"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # inline says that it leaves it behind
async def test_a_method_that_will_not_be_cancelled_holds_up_nobody(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "ENDING_SECONDS", 0.1)

    class Stubborn(Worker):
        rounds = 100

        async def insist(self) -> None:
            for number in range(100):
                if number > Stubborn.rounds:
                    return
                try:
                    await asyncio.sleep(0.05)
                except asyncio.CancelledError:
                    continue

    worker = await backend.spawn(Stubborn, name="w", resources=Resources(), args={})
    start = time.monotonic()
    with pytest.raises(WorkerDied, match="did not finish"):
        await worker.call("insist", timeout=0.05)
    await worker.kill()
    assert time.monotonic() - start < 3
    Stubborn.rounds = 0  # the event loop of this test waits for what is left of it


async def test_files_are_where_workers_can_read_them(backend: Backend, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("content")
    worker = await spawn(backend)
    folder, file = await backend.put(tmp_path / "folder"), await backend.put(tmp_path / "folder" / "file")
    assert await worker.call("read", f"{folder}/file") == await worker.call("read", file) == "content"
    assert await backend.put(tmp_path / "folder") == folder
    if isinstance(backend, ProcessBackend):
        assert not folder.startswith(str(tmp_path))
        await backend.close()
        assert not Path(folder).exists()


def test_every_error_of_ours_survives_its_journey() -> None:
    import pickle

    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.MRLError)]
    assert len(kinds) > 10
    for kind in kinds:
        error = kind("option: what to do")
        error.reword("argument: what to do")
        copied = pickle.loads(pickle.dumps(error))
        assert (type(copied), str(copied), copied.worded) == (kind, "argument: what to do", True)
    died = pickle.loads(pickle.dumps(WorkerDied("gone", "actor")))
    assert (str(died), died.worker) == ("gone", "actor")
