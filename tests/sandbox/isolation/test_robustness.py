"""Nothing is left behind, nothing is lost, nothing is invented."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from mrl.sandbox.base import Limits
from mrl.sandbox.engine.client import IsolatedExecutor
from mrl.sandbox.engine.slot import Slot
from mrl.sandbox.execution import Execution, Observation
from tests.sandbox.asking import NOTHING, Call, execution
from tests.sandbox.asking import seen as read
from tests.soak import slow_but

GOOD = execution("def f(x):\n    return x * 2\n", (Call("f", (21,)), Call("f", ("ab",))))
QUICK = Limits(wall_seconds=0.4, cpu_seconds=1, memory_mb=128, output_bytes=10_000)
HOSTILE = [
    "while True: pass", "import os; os._exit(0)", "import os; os.write(3, b'x' * 5000)", "print('x' * 100_000)",
    "import os; os.fork()", "x = bytearray(10**9)", "import ctypes; ctypes.string_at(0)",
    "import os; os.closerange(0, 99)",
    "import threading, time\nfor _ in range(50): threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
    "import gc, os\nfor o in gc.get_objects():\n    if type(o) is dict: o.clear()",
    "import sys; sys.stdout = None; 1/0",
    "open('x', 'w').write('x' * 10**7)", "import os; os.kill(os.getpid(), 9)", "import os; os.kill(-1, 9)",
]  # fmt: skip


def answered(seen: Observation) -> bool:
    found = read(seen)
    return found.status == "done" and [answer.value for answer in found.answers] == [42, "abab"]


def descendants() -> set[int]:
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                parents[int(name)] = int(Path("/proc", name, "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found, grown = {os.getpid()}, True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in found} - found
        grown, found = bool(more), found | more
    return found - {os.getpid()}


def footprint() -> tuple[object, ...]:
    return descendants(), len(os.listdir("/proc/self/fd")), Path("/proc/self/mounts").read_text(), temporary()


def temporary() -> set[str]:
    return set(os.listdir(tempfile.gettempdir()))


@pytest.fixture(autouse=True)
def _own_temporary_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # others on this machine have files in the shared one


async def mixed(count: int, layer: str) -> None:
    """Good ones all pass; the slots' own processes do not grow; afterwards nothing is left."""
    await IsolatedExecutor(slots=1, layer=layer).close()
    before = footprint()
    executor = IsolatedExecutor(slots=2, layer=layer)
    dice = random.Random(0)
    executions = [
        GOOD if dice.random() < 0.7 else Execution(dice.choice(HOSTILE), ("assert f(1) == 1",), QUICK)
        for _ in range(count)
    ]
    seen = await executor.execute(executions)
    during = len(descendants() - before[0])  # type: ignore[operator]
    counts = [len(os.listdir(f"/proc/{slot.process.pid}/fd")) for slot in executor._idle]
    await executor.close()
    assert [s for e, s in zip(executions, seen, strict=True) if e is GOOD and not answered(s)] == []
    for given, one in zip(executions, seen, strict=True):
        assert given is GOOD or not any(test.passed for test in one.verdict.tests), one
        assert one.verdict.judged, one
    assert 4 <= during <= 8  # a supervisor and a server per slot; what waits for more: a judge, a process
    assert max(counts) <= 17, counts
    assert footprint() == before


@pytest.mark.parametrize("count", [60, pytest.param(3400, marks=pytest.mark.soak)])
@pytest.mark.parametrize("layer", slow_but(["A"], ["A", "B", "C"]))
async def test_mixed_executions_leave_nothing(layer: str, count: int) -> None:
    await mixed(count, layer)


@pytest.mark.slow
async def test_a_killed_supervisor_comes_back() -> None:
    others = descendants()
    executor = IsolatedExecutor(slots=2)
    await executor.execute([GOOD] * 4)
    stop = threading.Event()
    kills = 0

    def assassin() -> None:
        nonlocal kills
        dice = random.Random(1)
        while not stop.is_set():
            victims = sorted(descendants() - others)
            if victims:
                try:
                    os.kill(dice.choice(victims), signal.SIGKILL)
                    kills += 1
                except ProcessLookupError:
                    pass
            time.sleep(0.25)

    thread = threading.Thread(target=assassin)
    thread.start()
    seen = []
    try:
        for _ in range(8):
            seen += await executor.execute([GOOD] * 25)
    finally:
        stop.set()
        thread.join()
    after = await executor.execute([GOOD] * 4)
    await executor.close()
    assert kills >= 2
    assert all(map(answered, after))
    for one in seen:  # a child that was hit is `killed`: data; but no answer is ever wrong
        assert answered(one) or one.verdict.status in ("killed", "protocol", "sandbox_error"), one
        assert all(a.kind == "unanswered" or a.value in (42, "abab", NOTHING) for a in read(one).answers)
    assert sum(map(answered, seen)) >= len(seen) - kills
    assert descendants() == others


@pytest.mark.parametrize("layer", slow_but("A", "ABC"))
def test_a_killed_trainer_leaves_nothing(layer: str) -> None:
    code = (
        "import asyncio, sys\nfrom mrl.sandbox.execution import Execution\n"
        "from mrl.sandbox.engine.client import IsolatedExecutor\n"
        f"e = IsolatedExecutor(slots=2, layer={layer!r}, unsafe=True)\n"
        "f = [e.submit(Execution('while True: pass')) for _ in range(2)]\n"
        "import time\nprint('running', flush=True)\ntime.sleep(60)"
    )
    others = descendants()
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=dict(os.environ))
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == b"running\n"
    deadline = time.monotonic() + 30
    while len(below := descendants() - {trainer.pid} - others) < 6:  # supervisor, server, program; twice
        assert time.monotonic() < deadline
        time.sleep(0.05)
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in below):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_nothing_outlives_a_program_without_isolation() -> None:
    """A daemon, twice forked, in a session of its own, that forks on."""
    code = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    for _ in range(5):\n        os.fork()\n"
        "    time.sleep(60)\n    os._exit(0)\n"
    )
    before = descendants()
    executor = IsolatedExecutor(slots=1, layer="unsafe", unsafe=True)
    (seen,) = await executor.execute([Execution(code)])
    left = descendants() - before
    await executor.close()
    assert seen.verdict.status == "passed"
    assert len(left) == 2  # the supervisor and the server


async def test_timers_count_against_a_limit() -> None:
    """Each takes the kernel's memory, and none is in the program's."""
    code = (
        "import ctypes\nlibc = ctypes.CDLL(None)\ndef f():\n    made = 0\n"
        "    while made < 5000 and libc.timer_create(0, None, ctypes.byref(ctypes.c_void_p())) == 0: made += 1\n"
        "    return made\n"
    )
    executor = IsolatedExecutor(slots=1)
    (seen,) = await executor.execute([Execution(code, ("made = f()",), report=("made",))])
    await executor.close()
    assert int(seen.report[0] or 5000) <= 64


async def test_a_sleeper_holds_nobody_up() -> None:
    executor = IsolatedExecutor(slots=2)
    sleeper = executor.submit(Execution("import time; time.sleep(60)", limits=Limits(wall_seconds=60)))
    others = [asyncio.wrap_future(executor.submit(GOOD)) for _ in range(60)]
    assert all(answered(one) for one in await asyncio.gather(*others))
    assert not sleeper.done()
    sleeper.cancel()
    await executor.close()


async def test_cancelling_kills_what_it_started() -> None:
    executor = IsolatedExecutor(slots=1)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(executor.execute([Execution("while True: pass"), GOOD]), 0.5)
    started = time.monotonic()
    assert answered((await executor.execute([GOOD]))[0])
    assert time.monotonic() - started < 20
    await executor.close()


async def test_what_is_cancelled_while_its_slot_starts_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Slot.__init__

    def slowly(*args: Any) -> None:
        start(*args)
        time.sleep(1)

    monkeypatch.setattr(Slot, "__init__", slowly)
    executor = IsolatedExecutor(slots=1)
    endless = Execution("while True: pass", limits=Limits(wall_seconds=300, cpu_seconds=300))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(executor.execute([endless]), 0.1)
    started = time.monotonic()
    assert answered((await executor.execute([GOOD]))[0])
    assert time.monotonic() - started < 60
    await executor.close()


def test_threads_and_event_loops_share_an_executor() -> None:
    executor = IsolatedExecutor(slots=2)
    seen: list[Observation] = []

    def loop() -> None:
        seen.extend(asyncio.run(executor.execute([GOOD] * 10)))

    threads = [threading.Thread(target=loop) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    executor.shutdown()
    executor.shutdown()
    assert len(seen) == 40
    assert all(map(answered, seen))


def test_a_closed_executor_says_so() -> None:
    executor = IsolatedExecutor(slots=1)
    executor.shutdown()
    with pytest.raises(RuntimeError):
        executor.submit(GOOD)
