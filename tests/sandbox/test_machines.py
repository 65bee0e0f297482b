"""The isolation carried to machines apart; here the machines are processes of this one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import zipfile
from io import BytesIO

import pytest

from mrl.errors import SandboxError
from mrl.sandbox import IOTest, Limits, Program, protocol
from mrl.sandbox.confine import selftest
from mrl.sandbox.execution import Execution
from mrl.sandbox.graded import GradedSandbox
from mrl.sandbox.machines import MachineExecutor, bundle, executor
from mrl.sandbox.protocol import Kind

pytestmark = pytest.mark.skipif(bool(selftest.unsupported()), reason=selftest.unsupported() or "Linux")
LIMITS = Limits(wall_seconds=5, cpu_seconds=5)
RIGHT = Program("def f(x): return x + 1", ("assert f(1) == 2",), LIMITS)


class Process:
    """A machine: a process here. `started` counts them."""

    started: list[Process]

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.stopped = False

    async def write(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        await self.process.stdin.drain()

    async def read(self) -> bytes:
        assert self.process.stdout is not None
        return await self.process.stdout.read(65536)

    async def stop(self) -> None:
        self.stopped = True
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()


@pytest.fixture
def machines() -> list[Process]:
    return []


@pytest.fixture
def open_machine(machines):
    async def open_machine(command: list[str]) -> Process:
        pipe = asyncio.subprocess.PIPE
        machines.append(Process(await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)))
        return machines[-1]

    return open_machine


async def judged(executor: MachineExecutor, *programs: Program) -> list[str]:
    sandbox = GradedSandbox(executor)
    try:
        verdicts = await sandbox.run(list(programs))
    finally:
        await sandbox.close()
    return [verdict.status for verdict in verdicts]


async def test_programs_are_judged_as_on_this_machine(open_machine, machines):
    programs = [
        RIGHT,
        Program("def f(x): return x", RIGHT.tests, LIMITS),
        Program("print(input()[::-1])", (IOTest("abc\n", "cba\n"),), LIMITS),
        Program("class A:\n    def f(self): return self\n", ("a = A()\nassert a.f() is a",), LIMITS),
        Program("import os; os._exit(0)", RIGHT.tests, LIMITS),
        Program("while True: pass", RIGHT.tests, Limits(wall_seconds=1, cpu_seconds=1)),
    ]
    statuses = await judged(MachineExecutor(open_machine, machines=2, slots=2), *programs)
    assert statuses == ["passed", "failed", "passed", "passed", "exited", "timeout"]
    assert len(machines) == 2
    assert all(machine.stopped and machine.process.returncode is not None for machine in machines)


@pytest.mark.slow
async def test_one_machine_serves_many_programs(open_machine, machines):
    programs = [Program(f"def f(x): return x + 1 + 0 * {n}", RIGHT.tests, LIMITS) for n in range(12)]
    assert await judged(MachineExecutor(open_machine, machines=3, slots=2), *programs) == ["passed"] * 12
    assert len(machines) <= 3


def patch_archive(monkeypatch: pytest.MonkeyPatch, **added: str) -> None:
    """The agent's modules as they travel, with lines added to some."""
    made = BytesIO()
    with zipfile.ZipFile(BytesIO(bundle.archive())) as old, zipfile.ZipFile(made, "w") as new:
        for name in old.namelist():
            more = added.get(name.rpartition("/")[2].removesuffix(".py"), "")
            new.writestr(name, old.read(name) + more.encode())
    monkeypatch.setattr(bundle, "archive", made.getvalue)


NO_LAYER = "\ndef test_layer(layer, python): return LayerResult(layer, False, f'no {layer}')\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="makes users of its own as root")
async def test_without_a_layer_users_keep_programs_from_their_judges(open_machine, monkeypatch):
    patch_archive(monkeypatch, selftest=NO_LAYER)
    reach = """
import os, signal
def f(x):
    reached = 0
    for pid in (int(pid) for pid in os.listdir('/proc') if pid.isdigit() and int(pid) != os.getpid()):
        for act in (lambda: os.kill(pid, signal.SIGKILL), lambda: open(f'/proc/{pid}/mem', 'r+b').close()):
            try: act()
            except OSError: continue
            reached += 1
    return reached
"""
    files = "def f(x):\n    open('written', 'w').write(str(x))\n    return 0"
    read = ("assert f(3) == 0 and open('written').read() == '3'",)
    pool = MachineExecutor(open_machine, machines=1)
    programs = [RIGHT, Program(reach, ("assert f(1) == 0",), LIMITS), Program(files, read, LIMITS)]
    verdicts = await GradedSandbox(pool).run(programs)
    await pool.close()
    assert [verdict.status for verdict in verdicts] == ["passed"] * 3, verdicts
    assert pool.layer == "unsafe"


async def test_without_a_layer_and_users_a_machine_judges_nothing(open_machine, machines, monkeypatch):
    patch_archive(monkeypatch, selftest=NO_LAYER, layers="\ndef _may_become(uid): return False\n")
    pool = MachineExecutor(open_machine, machines=1)
    verdicts = await GradedSandbox(pool).run([RIGHT, Program("x = 1", RIGHT.tests, LIMITS)])
    await pool.close()
    assert [verdict.status for verdict in verdicts] == ["sandbox_error"] * 2
    assert all("no A" in verdict.detail and "`sandbox: local`" in verdict.detail for verdict in verdicts)
    assert len(machines) == 1  # another would not do either


@pytest.mark.slow
async def test_a_lost_machine_is_replaced_and_its_programs_run_again(open_machine, machines):
    pool = MachineExecutor(open_machine, machines=1, slots=2)
    slow = Execution("import time\ndef f(x):\n    time.sleep(1.5)\n    return x", ("assert f(7) == 7",), LIMITS)
    running = asyncio.ensure_future(pool.execute([slow, slow]))
    while not machines:
        await asyncio.sleep(0.05)
    await asyncio.sleep(1.0)
    machines[0].process.kill()
    seen = await running
    assert [one.verdict.status for one in seen] == ["passed"] * 2
    assert len(machines) == 2
    await pool.close()


async def test_a_machine_that_never_comes_is_an_error_of_ours(monkeypatch):
    async def open_machine(command):
        raise ConnectionError("no quota left")

    pool = MachineExecutor(open_machine)
    verdict = (await GradedSandbox(pool).run([RIGHT]))[0]
    assert verdict.status == "sandbox_error"
    assert "no quota left" in verdict.detail
    await pool.close()

    async def never(command):
        await asyncio.sleep(60)

    monkeypatch.setattr(executor, "START_SECONDS", 0.2)
    pool = MachineExecutor(never)
    verdict = (await GradedSandbox(pool).run([RIGHT]))[0]
    assert verdict.status == "sandbox_error"
    assert "not ready within" in verdict.detail
    await pool.close()


class Liar:
    """A machine that answers what no agent does."""

    def __init__(self, answer) -> None:
        self.answer = answer
        self.queue: asyncio.Queue[bytes] = asyncio.Queue()
        self.greeted = False

    async def write(self, data: bytes) -> None:
        if self.greeted:
            number = data[protocol.HEADER.size : protocol.HEADER.size + 8]
            self.queue.put_nowait(protocol.pack(Kind.OBSERVATION, number + json.dumps(self.answer).encode()))
        else:
            self.greeted = True
            self.queue.put_nowait(protocol.pack(Kind.HELLO, json.dumps({"layer": "A"}).encode()))

    async def read(self) -> bytes:
        return await self.queue.get()

    async def stop(self) -> None:
        self.queue.put_nowait(b"")


@pytest.mark.parametrize(
    "answer",
    [
        {"status": "passed"},
        {"status": "passed", "tests": [[False, ""]], "detail": "", "report": []},
        {"status": "done", "tests": [[True, ""]]},
        {"status": "passed", "tests": "?"},
        {"status": "passed", "tests": [[True, ""]] * 50},
        {"status": ["passed"], "tests": []},
    ],
)
async def test_an_answer_that_cannot_be_read_is_no_pass(answer):
    async def open_machine(command):
        return Liar(answer)

    pool = MachineExecutor(open_machine)
    verdict = (await GradedSandbox(pool).run([RIGHT]))[0]
    assert verdict.status != "passed"
    assert verdict.fraction_passed == 0
    await pool.close()


def test_what_travels_stands_on_the_standard_library_alone():
    names = zipfile.ZipFile(BytesIO(bundle.archive())).namelist()
    assert "mrl/sandbox/engine/supervisor.py" in names
    assert len(bundle.archive()) < 200_000


def test_bad_settings_are_refused(open_machine):
    for options, words in (({"machines": 0}, "machines"), ({"slots": 0}, "slots"), ({"layer": "Z"}, "auto, A")):
        with pytest.raises(SandboxError, match=words):
            MachineExecutor(open_machine, **options)
