"""The isolation carried to machines apart; here the machines are processes of this one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import zipfile
from io import BytesIO

import pytest

from mrl.errors import SandboxError
from mrl.sandbox import IOTest, Limits, Program
from mrl.sandbox.execution import Call, Execution
from mrl.sandbox.graded import GradedSandbox
from mrl.sandbox.isolation import frames, selftest
from mrl.sandbox.machines import MachineExecutor, bundle, executor

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


async def test_without_a_layer_a_machine_runs_one_program(open_machine, machines):
    programs = [Program(f"def f(x): return x + 1 + 0 * {n}", RIGHT.tests, LIMITS) for n in range(4)]
    pool = MachineExecutor(open_machine, machines=2, slots=2, layer="machine")
    proxied = Execution("class A: pass", peer=("assert A() is not None",))
    (refused,) = await pool.execute([proxied])
    assert refused.status == "sandbox_error"
    assert "asserts on plain data" in refused.detail
    assert await judged(pool, *programs) == ["passed"] * 4
    assert pool.layer == "machine"
    assert len(machines) == 4  # the first was not used up by the refusal


@pytest.mark.slow
async def test_a_lost_machine_is_replaced_and_its_programs_run_again(open_machine, machines):
    pool = MachineExecutor(open_machine, machines=1, slots=2)
    slow = Execution("import time\ndef f(x):\n    time.sleep(1.5)\n    return x", (Call("f", (7,)),), limits=LIMITS)
    running = asyncio.ensure_future(pool.execute([slow, slow]))
    while not machines:
        await asyncio.sleep(0.05)
    await asyncio.sleep(1.0)
    machines[0].process.kill()
    seen = await running
    assert [one.answers[0].value for one in seen] == [7, 7]
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
    """A machine that a program has taken over."""

    def __init__(self, answer) -> None:
        self.answer = answer
        self.queue: asyncio.Queue[bytes] = asyncio.Queue()
        self.greeted = False

    async def write(self, data: bytes) -> None:
        if self.greeted:
            number = data[frames.HEADER.size : frames.HEADER.size + 8]
            self.queue.put_nowait(frames.pack(b"o", number + json.dumps(self.answer).encode()))
        else:
            self.greeted = True
            self.queue.put_nowait(frames.pack(b"h", json.dumps({"layer": "A", "reasons": {}}).encode()))

    async def read(self) -> bytes:
        return await self.queue.get()

    async def stop(self) -> None:
        self.queue.put_nowait(b"")


@pytest.mark.parametrize(
    "answer",
    [
        {"status": "passed"},
        {"status": "done", "answers": "?", "blocks": []},
        {"status": "done", "answers": [["V", "[1,2"]], "blocks": []},
        {"status": "done", "answers": [["V", "true"]] * 50, "blocks": [[]]},
        {"status": ["done"], "answers": []},
        {"status": "done", "answers": []},
    ],
)
async def test_a_machine_taken_over_forges_nothing(answer):
    async def open_machine(command):
        return Liar(answer)

    pool = MachineExecutor(open_machine)
    verdict = (await GradedSandbox(pool).run([RIGHT]))[0]
    assert verdict.status != "passed"
    assert verdict.fraction_passed == 0
    await pool.close()


def test_what_travels_stands_on_the_standard_library_alone():
    names = zipfile.ZipFile(BytesIO(bundle.archive())).namelist()
    assert "mrl/sandbox/isolation/supervisor.py" in names
    assert len(bundle.archive()) < 200_000
    assert not [name for name in names if "grading" in name]  # nothing that knows what is expected


def test_bad_settings_are_refused(open_machine):
    for options, words in (({"machines": 0}, "machines"), ({"slots": 0}, "slots"), ({"layer": "Z"}, "auto or machine")):
        with pytest.raises(SandboxError, match=words):
            MachineExecutor(open_machine, **options)
