"""Programs that follow one another in one slot: what waits for the next of them, and what one finds of another."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mrl.sandbox.base import Limits
from mrl.sandbox.engine.client import IsolatedExecutor
from mrl.sandbox.execution import Execution, Observation

CODE = "def f(x): return x + 1"
TESTS = ("assert f(1) == 2", "assert f(2) == 3")


@pytest.fixture
def executor() -> Iterator[IsolatedExecutor]:
    made = IsolatedExecutor(slots=1)
    yield made
    made.shutdown()


def judged(executor: IsolatedExecutor, *executions: Execution) -> list[Observation]:
    """One after the other."""
    return [asyncio.run(executor.execute([execution]))[0] for execution in executions]


def below(pid: int) -> list[int]:
    """Its descendants, each after its parent."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found += [child, *below(child)]
    return found


LEAVINGS = {
    "a file": "open('left', 'w').write('mine')",
    "a file that is gone again": "open('left', 'w').write('mine'); os.remove('left')",
    "a folder": "os.mkdir('left')",
    "a link": "os.symlink('/', 'left')",
    "a full folder": "open('left', 'wb').write(bytes(15 << 20))",
    "a folder that nobody may enter": "os.chmod('.', 0)",
    "another time": "os.utime('.', (1, 1))",
    "a file without a name, on its way": (
        "import array, socket\n"
        "for _ in range(15):\n"
        "    file = os.open('.', os.O_TMPFILE | os.O_RDWR, 0o600)\n"
        "    os.write(file, bytes(1 << 20))\n"
        "    a, b = socket.socketpair()\n"
        "    rights = array.array('i', [a.fileno(), b.fileno(), file])\n"
        "    a.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])\n"
        "    [os.close(fd) for fd in (a.detach(), b.detach(), file)]"
    ),
}


def test_the_scratch_folder_is_as_new(executor: IsolatedExecutor) -> None:
    if executor.layer != "A":
        pytest.skip("only layer A has one")
    look = (
        "import os\n"
        "found = os.listdir('.'), oct(os.stat('.').st_mode & 0o777), os.stat('.').st_mtime > 9\n"
        "open('all', 'wb').write(bytes(15 << 20))\n"
        "def f(): return found"
    )
    for what, act in LEAVINGS.items():
        leave = Execution(f"import os\n{act}\ndef f(x): return x + 1", TESTS)
        clean = Execution(look, ("assert f() == ([], '0o700', True)",))
        left, seen = judged(executor, leave, clean)
        assert left.verdict.status == "passed", (what, left.verdict)
        assert seen.verdict.status == "passed", (what, seen.verdict)


def test_a_program_and_its_judge_share_it(executor: IsolatedExecutor) -> None:
    if executor.layer != "A":
        pytest.skip("only layer A has one")
    tests = ("f('hello')\nassert open('made').read() == 'hello'", "open('given', 'w').write('x')\nassert g() == 'x'")
    code = "def f(x): open('made', 'w').write(x)\ndef g(): return open('given').read()"
    for one in judged(executor, *[Execution(code, tests)] * 3):
        assert one.verdict.status == "passed", one.verdict


def test_threads_that_others_start_are_not_the_programs(executor: IsolatedExecutor) -> None:
    """Where a program has no user of its own, its limit counts everybody's threads."""
    code = "import threading\ndef f(x):\n  t = threading.Thread(target=print)\n  t.start(); t.join()\n  return x + 1"
    release = threading.Event()
    others = [threading.Thread(target=release.wait) for _ in range(300)]
    try:
        (before,) = judged(executor, Execution(code, TESTS))
        for thread in others:
            thread.start()
        (after,) = judged(executor, Execution(code, TESTS))
    finally:
        release.set()
    assert (before.verdict.status, after.verdict.status) == ("passed", "passed"), after.verdict


def test_nothing_is_known_of_the_one_before(executor: IsolatedExecutor) -> None:
    code = (
        "import sys\nkernel = sys.modules['mrl_sandbox.confine.kernel']\n"
        "def f(): return [*kernel._USAGE, *kernel._STATUS]"
    )
    for one in judged(executor, *[Execution(code, ("assert set(f()) == {0}",))] * 2):
        assert one.verdict.status == "passed", one.verdict


def test_few_descriptors_are_the_programs_alone(executor: IsolatedExecutor) -> None:
    for one in judged(executor, *(Execution(CODE, TESTS, Limits(open_files=count)) for count in (5, 6, 7))):
        assert one.verdict.status == "passed", one.verdict


def test_what_waits_has_the_limits_of_the_one_that_comes(executor: IsolatedExecutor) -> None:
    """A process that was made ready with other limits is not used."""
    big = "x = bytearray(200 << 20)\ndef f(x): return x + 1"
    statuses = [
        one.verdict.status
        for one in judged(
            executor,
            *(Execution(big, TESTS, Limits(memory_mb=memory)) for memory in (512, 64, 64, 512, 512, 64)),
        )
    ]
    assert statuses == ["passed", "memory", "memory", "passed", "passed", "memory"]


def test_results_need_no_room_of_the_programs(executor: IsolatedExecutor) -> None:
    """What the judge writes down does not count as the program's files."""
    wrong = "'" + "\u00fc" * 400 + "'"
    tests = tuple(f"assert f({wrong}) == {k}" for k in range(400))
    (one,) = judged(executor, Execution("def f(x): return x", tests, Limits(file_mb=1)))
    assert (one.verdict.status, len(one.verdict.tests)) == ("failed", 400), one.verdict.status
    assert all("; got " in test.detail for test in one.verdict.tests)


def test_what_waits_may_die(executor: IsolatedExecutor) -> None:
    """The kernel takes a waiting process first when memory is short: the next program is judged all the same."""
    if executor.layer != "A":
        pytest.skip("in layers B and C none waits where programs have no user of their own")
    for _ in range(4):
        (one,) = judged(executor, Execution(CODE, TESTS))
        assert one.verdict.status == "passed", one.verdict
        (slot,) = executor._idle
        while len(waiting := below(slot.process.pid)[1:]) < 2:  # a judge, and a process for the next program
            time.sleep(0.01)
        for pid in waiting:
            os.kill(pid, signal.SIGKILL)
            while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.01)


def test_scripts_and_tests_take_turns(executor: IsolatedExecutor) -> None:
    asked, script = Execution(CODE, TESTS), Execution("print(open('/dev/stdin').read())", stdin="hello")
    for one in judged(executor, asked, script, asked, asked, script):
        assert one.verdict.status == "passed", one.verdict
        assert one.verdict.stdout in ("", "hello\n")
