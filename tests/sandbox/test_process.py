"""The process sandbox, with real processes: what programs do, what becomes of it, and that nothing is left behind."""

import asyncio
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mrl.errors import SandboxError
from mrl.sandbox import IOTest, Limits, Program, Verdict
from mrl.sandbox.process import ProcessSandbox

USUAL = Limits()
QUICK = Limits(wall_seconds=1.0, cpu_seconds=1)
linux = pytest.mark.skipif(sys.platform != "linux", reason="subreaper and /proc are Linux's")


@pytest.fixture(scope="module")
def sandbox() -> Iterator[ProcessSandbox]:
    sandbox = ProcessSandbox(slots=2)
    yield sandbox
    sandbox.shutdown()


async def judge(sandbox: ProcessSandbox, code: str, *tests, limits: Limits = USUAL) -> Verdict:
    (verdict,) = await sandbox.run([Program(code, tests or ("assert True",), limits)])
    return verdict


def passed(verdict: Verdict) -> list[bool]:
    return [test.passed for test in verdict.tests]


def scratch_dirs() -> set[str]:
    return {path.name for path in Path(tempfile.gettempdir()).glob("mrl-sandbox-*")}


def running(marker: str) -> list[int]:
    """Processes with `marker` in their command line (zombies have none)."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if marker.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            pass
    return found


async def gone(condition, seconds: float = 5.0) -> bool:
    """Whether `condition` turns false in time."""
    end = time.monotonic() + seconds
    while condition():
        if time.monotonic() > end:
            return False
        await asyncio.sleep(0.02)
    return True


async def test_passes_and_fails(sandbox):
    verdict = await judge(sandbox, "def f(x): return x + 1", "assert f(1) == 2", "y = f(3)\nassert y == 5, y")
    assert verdict.status == "failed"
    assert passed(verdict) == [True, False]
    assert verdict.tests[1].detail == "y == 5: false; got 4 (4)"
    assert verdict.fraction_passed == 0.5
    verdict = await judge(sandbox, "def f(x): return x + 1", "y = f(1)", "assert y == 2")
    assert (verdict.status, passed(verdict)) == ("passed", [True, True])
    assert verdict.wall_seconds > 0
    assert verdict.peak_memory_mb > 1


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "raise SystemExit",
        "quit = exit = None\nimport sys\nsys.exit()",
        "import atexit, os; atexit.register(os._exit, 0); raise SystemExit(0)",
        "import os\nos.execv('/bin/true', ['true'])",
        "import os; os.closerange(3, 4096)",  # our channels with it
        "import os; os._exit = lambda code: None; os.write = print; os.closerange(3, 4096)",
    ],
)
async def test_leaving_early_passes_nothing(sandbox, code):
    verdict = await judge(sandbox, code, "assert True", "assert True")
    assert verdict.status in ("exited", "protocol")
    assert passed(verdict) == [False, False]


@pytest.mark.parametrize(
    "code",
    [
        "import builtins\nbuiltins.exec = lambda *a: None\nbuiltins.compile = lambda *a: ''",
        "import os\nos.write = lambda *a: 0\nos._exit = lambda *a: None\nos.getpid = lambda: 1",
        "import builtins\nbuiltins.AssertionError = builtins.BaseException = builtins.SystemExit = OSError",
        "import sys\nsys.stdout = sys.stderr = None",
        "print('0123456789abcdef P 0 ')",
        "import os, time\nif os.fork(): time.sleep(0.3)",
        "import os\nfor fd in range(3, 64):\n  try: os.write(fd, b'0123456789abcdef P 0 \\n')\n  except OSError: pass",
    ],
)
async def test_tampering_passes_nothing(sandbox, code):
    verdict = await judge(
        sandbox, code + "\ndef f(): return 1", "assert f() == 2", "assert f() == 1", limits=Limits(wall_seconds=2)
    )
    assert not passed(verdict)[0]
    assert verdict.status in ("failed", "protocol", "exited", "timeout")


async def test_garbage_on_every_descriptor_is_a_protocol_error(sandbox):
    code = "import os\nfor fd in range(3, 400):\n  try: os.write(fd, b'0 P 0 \\n')\n  except OSError: pass"
    verdict = await judge(sandbox, code)
    assert (verdict.status, passed(verdict)) == ("protocol", [False])


async def test_exit_inside_a_test_fails_only_that_test(sandbox):
    code = "import sys\ndef f(x):\n    if x: sys.exit(0)\n    return 1"
    verdict = await judge(sandbox, code, "assert f(0) == 1", "assert f(1) == 1", "assert f(0) == 1")
    assert passed(verdict) == [True, False, True]
    assert "SystemExit" in verdict.tests[1].detail


async def test_partial_credit_before_a_crash(sandbox):
    code = "import os\ndef f(x):\n    if x == 2: os.abort()\n    return x"
    verdict = await judge(sandbox, code, "assert f(0) == 0", "assert f(1) == 1", "assert f(2) == 2", "assert f(3) == 3")
    assert (verdict.status, verdict.detail) == ("crashed", "signal 6")
    assert passed(verdict) == [True, True, False, False]
    assert verdict.tests[3].detail == "not reached"


@pytest.mark.parametrize(
    ("code", "status", "detail"),
    [
        ("x = 1\n1 / 0", "error", "ZeroDivisionError: division by zero\nprogram line 2: 1 / 0"),
        ("def f(:", "error", "SyntaxError"),
        ("import no_such_module", "error", "ModuleNotFoundError"),
        ("def f(): f()\nf()", "error", "RecursionError"),
        ("class E(Exception):\n  def __str__(self): return 1 / 0\nraise E", "error", "cannot be shown"),
        ("x = '\ud800'", "error", "UnicodeEncodeError"),
        ("x = bytearray(10**10)", "memory", "512 MB"),
        ("import ctypes; ctypes.string_at(0)", "crashed", "signal 11"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", "crashed", "signal 15"),
        ("import os\nwhile True: os.write(1, b'x' * 4096)", "output_limit", "100000 bytes"),
        ("import os\nwhile True: os.write(2, b'x' * 4096)", "output_limit", "100000 bytes"),
    ],
)
async def test_status(sandbox, code, status, detail):
    verdict = await judge(sandbox, code, limits=Limits(wall_seconds=10, output_bytes=100_000))
    assert verdict.status == status
    assert detail in verdict.detail
    assert verdict.judged
    assert verdict.fraction_passed == 0
    assert len(verdict.stdout) + len(verdict.stderr) < 400_000


async def test_time_is_bounded(sandbox):
    start = time.monotonic()
    asleep, busy, in_test = await sandbox.run(
        [
            Program("import time; time.sleep(60)", ("assert True",), QUICK),
            Program("while True: pass", ("assert True",), Limits(wall_seconds=20, cpu_seconds=1)),
            Program("def f():\n while True: pass", ("assert True", "f()", "assert True"), QUICK),
        ]
    )
    assert time.monotonic() - start < 12
    assert [v.status for v in (asleep, busy, in_test)] == ["timeout"] * 3
    assert "processor time" in busy.detail
    assert passed(in_test) == [True, False, False]


async def test_memory_of_small_limits_is_on_top_of_the_interpreter(sandbox):
    limits = Limits(memory_mb=32)
    assert (await judge(sandbox, "x = bytearray(16 << 20)", limits=limits)).status == "passed"
    assert (await judge(sandbox, "x = bytearray(40 << 20)", limits=limits)).status == "memory"
    verdict = await judge(sandbox, "def f(): return bytearray(40 << 20)", "f()", "assert 1", limits=limits)
    assert (verdict.status, passed(verdict)) == ("memory", [False, True])


async def test_files_are_bounded(sandbox):
    code = "files = [open('x', 'w') for _ in range(200)]"
    assert "Too many open files" in (await judge(sandbox, code)).detail
    code = "with open('x', 'wb', 0) as file:\n    for _ in range(100): file.write(b'x' * (1 << 20))"
    assert "File too large" in (await judge(sandbox, code)).detail


@pytest.mark.skipif(os.geteuid() != 0, reason="exact only for programs with a user id of their own")
async def test_processes_are_bounded(sandbox):
    code = "import os, time\nfor _ in range(200):\n    if os.fork() == 0: time.sleep(60); os._exit(0)"
    verdict = await judge(sandbox, code)
    assert verdict.status == "error"
    assert "BlockingIOError" in verdict.detail
    code = "import threading, time\nfor _ in range(8): threading.Timer(60, print).start()"
    assert (await judge(sandbox, code)).status == "passed"


@pytest.mark.skipif(os.geteuid() != 0, reason="root gives up its rights")
async def test_root_gives_up_its_rights(sandbox):
    code = """
import os
assert 0 not in (os.getuid(), os.geteuid(), os.getgid()) and os.getgroups() == []
for forbidden in (lambda: os.kill(os.getppid(), 0), lambda: open('/etc/mrl-test', 'w'), lambda: os.setuid(0)):
    try: forbidden()
    except PermissionError: pass
    else: raise RuntimeError('allowed')
import xml.dom.minidom  # the interpreter's library is still readable
"""
    verdict = await judge(sandbox, code)
    assert verdict.status == "passed", verdict.detail


async def test_surroundings(sandbox):
    os.environ["MRL_TEST_SECRET"] = "secret"
    try:
        code = """
import os, sys, __main__
print(dict(os.environ), sys.argv, __name__, os.listdir('.'), os.getpgid(0) == os.getpid(), sys.stdin.read() == '')
print(sorted(set(globals()) - {'os', 'sys', '__main__'}), __main__.__dict__ is globals(), 'mrl' in sys.modules)
print([n for n in os.listdir('/proc/self/fd') if int(n) > 5], hash('a'), os.getcwd(), sep='|')
"""
        other = ProcessSandbox(slots=1)
        first, second = await judge(sandbox, code), await judge(other, code)
        await other.close()
    finally:
        del os.environ["MRL_TEST_SECRET"]
    assert first.status == "passed", first.detail
    lines = first.stdout.splitlines()
    assert lines[0] == "{} ['program.py'] __main__ [] True True"
    names = "['__builtins__', '__doc__', '__file__', '__loader__', '__name__', '__package__', '__spec__']"
    assert lines[1] == f"{names} True False"
    fds, hashed, cwd = lines[2].split("|")
    assert fds == "[]"
    assert not Path(cwd).exists()
    assert second.stdout.splitlines()[2].split("|")[1] == hashed  # sets come in the same order every time


@linux
@pytest.mark.parametrize("how", ["", "os.setsid()"])
@pytest.mark.parametrize("end", ["while True: pass", "pass"])
async def test_background_children_do_not_survive(sandbox, how, end):
    marker = f"mrl-marker-{os.getpid()}-{time.monotonic_ns()}"
    code = f"""
import os
ready, go = os.pipe()
if os.fork() == 0:
    {how}
    if os.fork() == 0:
        os.execv('/bin/sleep', [{marker!r}, '60'])  # closes `go`
    os._exit(0)
os.close(go)
os.read(ready, 1)
print('started')
{end}
"""
    start = time.monotonic()
    verdict = await judge(sandbox, code, limits=QUICK)
    assert verdict.stdout == "started\n" or end != "pass"
    assert time.monotonic() - start < 10
    assert running(marker) == []


async def test_io_tests(sandbox):
    code = "import sys\nfor line in sys.stdin: print(int(line) * 2)\n"
    tests = (IOTest("1\n2\n", "2\n4"), IOTest("3", "6  \n\n"), IOTest("4", "9"), IOTest("x", ""), "assert True")
    verdict = await judge(sandbox, code, *tests)
    assert passed(verdict) == [True, True, False, False, True]
    assert verdict.tests[2].detail == "stdout line 1: expected '9', got '8'"
    assert "ValueError" in verdict.tests[3].detail
    assert verdict.status == "failed"


async def test_io_programs_may_end_as_they_like(sandbox):
    for end in ("import sys; sys.exit(0)", "import sys, os; sys.stdout.flush(); os._exit(0)", "print(end='')"):
        assert (await judge(sandbox, f"print(7)\n{end}", IOTest("", "7"))).status == "passed"
    threads = "import threading, atexit\natexit.register(print, 2)\nthreading.Timer(0.05, print, [1]).start()"
    assert (await judge(sandbox, threads, IOTest("", "1\n2"))).status == "passed"
    verdict = await judge(sandbox, "print(7)\nraise SystemExit(3)", IOTest("", "7"))
    assert (verdict.status, passed(verdict)) == ("exited", [False])
    main = "if __name__ == '__main__': print(input())"
    assert (await judge(sandbox, main, IOTest("ä\n", "ä"))).status == "passed"


async def test_io_tests_share_the_time(sandbox):
    code = "x = input()\nwhile x == 'spin': pass\nprint(x)"
    start = time.monotonic()
    verdict = await judge(sandbox, code, IOTest("a", "a"), IOTest("spin", "spin"), IOTest("b", "b"), limits=QUICK)
    assert time.monotonic() - start < 6
    assert (verdict.status, passed(verdict)) == ("timeout", [True, False, False])


async def test_large_input_and_output(sandbox):
    text = "0123456789abcde\n" * 50_000
    code = "import sys; sys.stdout.write(sys.stdin.read())"
    assert (await judge(sandbox, code, IOTest(text, text))).status == "passed"
    assert (await judge(sandbox, f"x = {text!r}", f"assert x == {text!r}")).status == "passed"


async def test_scratch_directories_are_removed():
    sandbox = ProcessSandbox(slots=1)
    code = "import os\nos.makedirs('a/b')\nopen('a/b/c', 'w').write('x')\nos.chmod('a/b', 0)\nos.chmod('a', 0)"
    code += "\nprint(os.getcwd())"
    verdict = await judge(sandbox, code)
    assert verdict.status == "passed"
    work = Path(verdict.stdout.strip())
    assert not work.exists()
    assert work.parent.is_dir()
    await sandbox.close()
    assert not work.parent.exists()


async def test_identical_programs_run_once():
    program = Program("import os; print(os.getpid())", ("assert True",))
    other = Program(program.code, program.tests, Limits(wall_seconds=29))
    sandbox = ProcessSandbox(slots=1)
    first, *rest, different = await sandbox.run([program] * 5 + [other])
    await sandbox.close()
    assert {v.stdout for v in rest} == {first.stdout} != {different.stdout}
    rest[0].tests[0].passed = False
    assert first.tests[0].passed  # equal, not shared


async def test_mixed_programs_leave_nothing():
    fds, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    kinds = [
        ("def f(): return {i}", "passed"),
        ("def f(): return -1", "failed"),
        ("import os; os._exit({i} % 2)", "exited"),
        ("x = [0] * 10**10, {i}", "memory"),
        ("raise ValueError({i})", "error"),
        ("import os; os.abort(); {i}", "crashed"),
        (
            "import os\nif os.fork() == 0:\n    os.setsid()\n    import time; time.sleep(50)\ndef f(): return {i}",
            "passed",
        ),
        ("open('file', 'w').write('x')\ndef f(): return {i}", "passed"),
    ]
    programs = [Program(kinds[i % 8][0].format(i=i), (f"assert f() == {i}",)) for i in range(80)]
    sandbox = ProcessSandbox(slots=2)
    verdicts = await sandbox.run(programs)
    assert [v.status for v in verdicts] == [kinds[i % 8][1] for i in range(80)]
    supervisors = [s.process.pid for s in sandbox._executor._idle]
    folders = [Path(s._folder) for s in sandbox._executor._idle]
    assert 1 <= len(supervisors) <= 2
    for pid in supervisors:  # nothing below it but the server
        below = subprocess.run(["ps", "--ppid", str(pid), "-o", "pid="], capture_output=True, text=True).stdout.split()
        assert len(below) == 1
        assert subprocess.run(["ps", "--ppid", *below, "-o", "pid="], capture_output=True).stdout.strip() == b""
    await sandbox.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in supervisors)
    assert not any(folder.exists() for folder in folders)
    assert await gone(lambda: len(os.listdir("/proc/self/fd")) > fds + 1 or threading.active_count() > threads + 1)


async def test_cancelling_kills():
    sandbox = ProcessSandbox(slots=1)
    task = asyncio.create_task(judge(sandbox, "import time; time.sleep(60)"))
    await asyncio.sleep(0.5)
    (supervisor,) = sandbox._executor._busy.values()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await gone(lambda: supervisor.process.poll() is None)
    assert (await judge(sandbox, "x = 1")).status == "passed"
    await sandbox.close()


async def test_closing_kills_and_is_final():
    sandbox = ProcessSandbox(slots=1)
    task = asyncio.create_task(sandbox.run([Program(f"import time; time.sleep({n})", ("1",)) for n in (60, 61)]))
    await asyncio.sleep(0.5)
    start = time.monotonic()
    await sandbox.close()
    assert time.monotonic() - start < 5
    assert [v.status for v in await task] == ["sandbox_error"] * 2
    await sandbox.close()
    with pytest.raises(SandboxError, match="closed"):
        await sandbox.run([])


@linux
async def test_killing_the_parent_kills_everything(tmp_path):
    marker = f"mrl-marker-{os.getpid()}-{time.monotonic_ns()}"
    script = f"""
import asyncio
from mrl.sandbox import Program
from mrl.sandbox.process import ProcessSandbox
code = "import os\\nif os.fork() == 0: os.setsid(); os.execv('/bin/sleep', ['{marker}', '60'])\\nwhile 1: pass"
asyncio.run(ProcessSandbox(slots=1).run([Program(code, ("1",))]))
"""
    before = scratch_dirs()
    process = subprocess.Popen([sys.executable, "-c", script])
    assert await gone(lambda: not [p for p in running(marker) if p != process.pid], 20)
    process.kill()
    process.wait()
    assert await gone(lambda: running(marker))
    assert await gone(lambda: scratch_dirs() - before)


async def test_a_lost_supervisor_is_replaced():
    sandbox = ProcessSandbox(slots=1)
    assert (await judge(sandbox, "x = 1")).status == "passed"
    folders = [Path(slot._folder) for slot in sandbox._executor._idle]
    assert all(folder.is_dir() for folder in folders)
    for supervisor in sandbox._executor._idle:
        supervisor.process.kill()
    assert (await judge(sandbox, "x = 2")).status == "passed"
    await sandbox.close()
    assert not any(folder.exists() for folder in folders)


async def test_failures_of_the_sandbox_are_not_verdicts(tmp_path):
    missing = ProcessSandbox(slots=1, python=str(tmp_path / "python"))
    verdict = await judge(missing, "x = 1")
    assert (verdict.status, verdict.judged, verdict.tests) == ("sandbox_error", False, [])
    assert "No such file" in verdict.detail
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho no interpreter here >&2\nexit 3\n")
    broken.chmod(0o755)
    sandbox = ProcessSandbox(slots=1, python=str(broken))
    verdict = await judge(sandbox, "x = 1")
    assert verdict.status == "sandbox_error"
    assert "exit code 3: no interpreter here" in verdict.detail
    await sandbox.close()
    await missing.close()


def test_works_from_any_thread_and_loop():
    sandbox = ProcessSandbox(slots=2)
    found: list[str] = []

    def work(n: int) -> None:
        found.append(asyncio.run(judge(sandbox, f"x = {n}", f"assert x == {n}")).status)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    asyncio.run(sandbox.close())
    assert found == ["passed"] * 6


def test_refuses_what_it_cannot_do(monkeypatch):
    with pytest.raises(SandboxError, match="slots"):
        ProcessSandbox(slots=0)
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SandboxError, match=r"darwin.*Linux container.*sandbox: modal"):
        ProcessSandbox()
