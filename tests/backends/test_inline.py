"""Workers in this process."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from mrl.backends import BACKENDS, Resources, base
from mrl.backends.inline import InlineBackend
from mrl.errors import ConfigError, WorkerDied


class Worker:
    def __init__(self, start: int) -> None:
        self.value = start
        self.closed = False
        self.release = threading.Event()
        self.busy = False
        self.threads: set[int] = set()

    def add(self, n: int) -> int:
        self.threads.add(threading.get_ident())
        self.value += n
        return self.value

    async def add_async(self, n: int) -> int:
        return self.add(n)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def hang(self) -> None:
        self.busy = True
        self.release.wait(60)
        self.busy = False

    async def never(self) -> None:
        await asyncio.Event().wait()

    def fail(self) -> None:
        raise ValueError("mine")

    async def time_out_by_itself(self) -> None:
        raise TimeoutError("mine")

    def close(self) -> None:
        assert not self.busy, "closed under a running call"
        self.closed = True


async def spawn(timeout: float = 10.0) -> tuple[InlineBackend, object]:
    backend = InlineBackend(timeout)
    return backend, await backend.spawn(Worker, name="w", resources=Resources(), args={"start": 1})


async def test_calls_reach_blocking_and_async_methods() -> None:
    backend, handle = await spawn()
    assert await handle.call("add", 2) == 3
    assert await handle.call("add_async", n=4) == 7
    assert await handle.alive()
    await backend.close()


async def test_blocking_calls_leave_the_loop_free() -> None:
    backend, handle = await spawn()
    slow = asyncio.create_task(handle.call("sleep", 0.3))
    ticks = 0
    while not slow.done():
        await asyncio.sleep(0.02)
        ticks += 1
    assert ticks > 5
    for _ in range(5):
        await handle.call("add", 1)
    assert threading.get_ident() not in handle.worker.threads
    await backend.close()


async def test_calls_run_in_turn_and_no_thread_waits_for_more() -> None:
    backend, handle = await spawn()
    await asyncio.gather(handle.call("sleep", 0.01), *(handle.call("add", 1) for _ in range(5)))
    assert handle.worker.value == 6
    await backend.close()
    for _ in range(500):
        if not any(thread.name == "mrl-w" for thread in threading.enumerate()):
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the worker's thread lives on with nothing to do")


async def test_a_worker_is_closed_after_its_call_and_never_during_it() -> None:
    backend, handle = await spawn()
    worker = handle.worker
    call, waiting = (asyncio.create_task(handle.call(name)) for name in ("hang", "fail"))
    while not worker.busy:
        await asyncio.sleep(0.01)
    ending = asyncio.create_task(backend.close())
    await asyncio.sleep(0.05)
    assert not ending.done()
    assert not worker.closed
    worker.release.set()
    await ending
    assert worker.closed
    await call
    with pytest.raises(WorkerDied, match=r"w: was ended during fail\(\)"):
        await waiting


async def test_a_call_that_hangs_is_named_and_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "ENDING_SECONDS", 0.1)
    backend, handle = await spawn(timeout=0.1)
    worker = handle.worker
    with pytest.raises(WorkerDied, match=r"w: hang\(\) did not finish in"):
        await handle.call("hang")
    with pytest.raises(WorkerDied, match=r"w: add\(\) .* waited for hang\(\), which still runs"):
        await handle.call("add", 1)
    with pytest.warns(RuntimeWarning, match=r"w: hang\(\) still runs .* left behind"):
        await backend.close()
    assert not worker.closed
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "mrl-w")
    worker.release.set()
    for _ in range(500):
        if worker.closed:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the worker was not closed when its call had returned")


async def test_what_a_method_raises_is_raised_here() -> None:
    backend, handle = await spawn()
    with pytest.raises(ValueError, match="mine"):
        await handle.call("fail")
    with pytest.raises(TimeoutError, match="mine"):
        await handle.call("time_out_by_itself")
    await backend.close()


@pytest.mark.parametrize("method", ["never", "sleep"])
async def test_no_call_hangs_for_ever(method: str) -> None:
    backend, handle = await spawn(timeout=0.1)
    arguments = (0.5,) if method == "sleep" else ()
    with pytest.raises(WorkerDied, match=r"w: .*call_timeout"):
        await handle.call(method, *arguments)
    await backend.close()


async def test_an_ended_worker_is_closed_and_says_so() -> None:
    backend, handle = await spawn()
    worker = handle.worker
    await backend.close()
    assert worker.closed
    assert not await handle.alive()
    with pytest.raises(WorkerDied, match="was ended"):
        await handle.call("add", 1)
    await handle.kill()


def test_unknown_backends_are_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"backend: 'inlin' is not available; did you mean 'inline'"):
        BACKENDS.get("inlin")
