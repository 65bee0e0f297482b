"""The local sandbox: verdicts, partial credit, duplicates, failures of ours; with real isolation where it works."""

import asyncio
import contextlib
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from mrl.errors import SandboxError
from mrl.sandbox import SANDBOXES, IOTest, Limits, Program, TestResult, Verdict
from mrl.sandbox.confine import selftest
from mrl.sandbox.execution import Observation
from mrl.sandbox.local import LocalSandbox, make_auto

QUICK = Limits(wall_seconds=1.0, cpu_seconds=1.0)
needs_layer = pytest.mark.skipif(
    bool(selftest.unsupported()) or not any(selftest.test_layer(layer).holds for layer in "ABC"),
    reason="no layer of isolation works here",
)


@pytest.fixture
async def sandbox() -> AsyncIterator[LocalSandbox]:
    sandbox = LocalSandbox(slots=2)
    yield sandbox
    await sandbox.close()


async def judge(sandbox, code: str, *tests, limits: Limits = Limits()) -> Verdict:  # noqa: B008
    (verdict,) = await sandbox.run([Program(code, tests or ("assert f(1) == 1",), limits)])
    return verdict


def passed(verdict: Verdict) -> list[bool]:
    return [test.passed for test in verdict.tests]


STATUSES = [
    ("def f(x): return x", "passed", ""),
    ("def f(x): return 2", "failed", "test 0: f(1) == 1: false; got 2"),
    ("def f(x): raise ValueError('no')", "failed", "raised ValueError: no"),
    ("1 / 0", "error", "ZeroDivisionError"),
    ("def f(:", "error", "SyntaxError"),
    ("import sys; sys.exit(0)", "exited", "0"),
    ("import os; os._exit(0)", "exited", "0"),
    ("def f(x): import os; os._exit(0)", "exited", "0"),
    ("while True: pass", "timeout", "1 s"),
    ("def f(x):\n    while True: pass", "timeout", "1 s"),
    ("import time; time.sleep(60)", "timeout", "1 s"),
    ("def f(x): return bytearray(10**10)", "memory", "512 MB"),
    ("import ctypes; ctypes.string_at(0)", "crashed", ""),
    ("while True: print('x' * 10000)", "output_limit", "100000 bytes"),
]


@needs_layer
async def test_status(sandbox):
    limits = Limits(wall_seconds=1.0, output_bytes=100_000)
    programs = [Program(code, ("assert f(1) == 1",), limits) for code, _, _ in STATUSES]
    for (code, status, detail), verdict in zip(STATUSES, await sandbox.run(programs), strict=True):
        assert verdict.status == status, (code, verdict)
        assert detail in verdict.detail
        assert verdict.judged
        assert passed(verdict) == [status == "passed"]


@needs_layer
@pytest.mark.parametrize("code", ["import sys; sys.exit(0)", "import os; os._exit(0)", "raise SystemExit"])
async def test_leaving_early_passes_not_even_a_test_that_asks_nothing(sandbox, code):
    verdict = await judge(sandbox, code, "assert True", "x = 1")
    assert (verdict.status, passed(verdict)) == ("exited", [False, False])
    assert passed(await judge(sandbox, "x = 1", "assert True", "x = 1")) == [True, True]


@needs_layer
async def test_partial_credit_before_a_crash(sandbox):
    code = "import os\ndef f(x):\n    if x == 2: os._exit(0)\n    return x"
    verdict = await judge(sandbox, code, *(f"assert f({k}) == {k}" for k in range(4)))
    assert verdict.status == "exited"
    assert passed(verdict) == [True, True, False, False]
    assert verdict.fraction_passed == 0.5
    assert [test.detail for test in verdict.tests[2:]] == ["not reached"] * 2


@needs_layer
async def test_kinds_of_tests_mix(sandbox):
    code = "import sys\ndef f(x): return x\nif __name__ == '__main__' and False: pass\nprint(*sys.stdin.read().split())"
    tests = (
        "assert f(1) == 1",
        IOTest("a b", "a b"),
        "if True:\n    assert f(2) == 2",
        IOTest("a", "b"),
        "assert f(3) == 4",
    )
    verdict = await judge(sandbox, code, *tests)
    assert passed(verdict) == [True, True, True, False, False]
    assert verdict.status == "failed"
    assert verdict.detail == "test 4: f(3) == 4: false; got 3"


@needs_layer
async def test_tests_that_need_the_objects(sandbox):
    code = """
class Node:
    def __init__(self, value): self.value = value
    def __eq__(self, other): return isinstance(other, Node) and other.value == self.value
def make(x): return Node(x)
def squares(n): return (k * k for k in range(n))
"""
    tests = (
        "n = make(3)\nif n.value == 3:\n    found = True\nassert found",
        "total = 0\nfor k in squares(4):\n    total += k\nassert total == 14",
        "while make(1).value != 1: pass",
        "if True:\n    assert make(1).value == 2",
    )
    verdict = await judge(sandbox, code, *tests)
    assert passed(verdict) == [True, True, True, False], verdict


@needs_layer
async def test_answers_that_are_objects_are_read_as_data(sandbox):
    """An int under an IntEnum, a tuple under a namedtuple; never by the object's own `__eq__`."""
    code = """
import collections, enum, fractions
Point = collections.namedtuple("Point", "x y")
class Colour(enum.IntEnum): RED = 1
class Any(int):
    def __eq__(self, other): return True
    __hash__ = int.__hash__
def f(x): return [Point(1, 2), Colour.RED, Any(5), collections.deque([1]), range(2), iter([1])][x]
"""
    right = "f(0) == (1, 2)", "f(1) == 1", "f(2) == 5", "list(f(3)) == [1]", "list(f(4)) == [0, 1]", "list(f(5)) == [1]"
    wrong = "f(0) == (1, 3)", "f(1) == 2", "f(2) == 6", "f(3) == [1]", "f(4) == [0, 1]", "f(5) == [1]", "f(0) is None"
    verdict = await judge(sandbox, code, *(f"assert {test}" for test in right + wrong))
    assert passed(verdict) == [True] * len(right) + [False] * len(wrong), verdict


@needs_layer
async def test_scripts_may_end_as_they_like_and_share_the_time(sandbox):
    for end in ("import sys; sys.exit(0)", "import sys, os; sys.stdout.flush(); os._exit(0)"):
        assert (await judge(sandbox, f"print(7)\n{end}", IOTest("", "7"))).status == "passed"
    verdict = await judge(sandbox, "print(7)\nraise SystemExit(3)", IOTest("", "7"))
    assert (verdict.status, passed(verdict)) == ("exited", [False])
    code = "x = input()\nwhile x == 'spin': pass\nprint(x)"
    start = time.monotonic()
    verdict = await judge(sandbox, code, IOTest("a", "a"), IOTest("spin", ""), IOTest("b", "b"), limits=QUICK)
    assert time.monotonic() - start < 5
    assert (verdict.status, passed(verdict)) == ("timeout", [True, False, False])


@needs_layer
async def test_a_sleeper_holds_nobody_up(sandbox):
    sleeper = asyncio.create_task(judge(sandbox, "import time; time.sleep(20)", limits=Limits(wall_seconds=20)))
    start = time.monotonic()
    verdicts = await sandbox.run([Program(f"def f(x): return {k}", (f"assert f(0) == {k}",)) for k in range(60)])
    assert [v.status for v in verdicts] == ["passed"] * 60
    assert time.monotonic() - start < 10
    assert not sleeper.done()
    sleeper.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await sleeper
    assert (await judge(sandbox, "def f(x): return x")).status == "passed"


class Scripted:
    """An executor that answers as told: failures of ours cannot be had on demand."""

    layer = "A"

    def __init__(self, *observations) -> None:
        self.observations, self.seen, self.closed = list(observations), [], 0

    async def execute(self, executions):
        self.seen += executions
        found = [self.observations.pop(0) for _ in executions]
        for one in found:
            if isinstance(one, Exception):
                raise one
        return found

    async def close(self) -> None:
        self.closed += 1


DONE = Observation(Verdict("passed", [TestResult(True)]))
BROKEN = Observation(Verdict("sandbox_error", detail="no slots"))


async def test_failures_of_ours_are_retried_once_and_then_reported():
    executor = Scripted(BROKEN, DONE)
    assert (await judge(LocalSandbox(executor=executor), "")).status == "passed"
    executor = Scripted(BROKEN, BROKEN)
    verdict = await judge(LocalSandbox(executor=executor), "")
    assert (verdict.status, verdict.detail, verdict.tests) == ("sandbox_error", "no slots", [])
    executor = Scripted(OSError("no more processes"), OSError("no more processes"))
    verdict = await judge(LocalSandbox(executor=executor), "")
    assert (verdict.judged, verdict.detail) == (False, "OSError: no more processes")
    executor = Scripted(Observation(Verdict("unjudgeable", [TestResult(False)], "it patches a module")))
    assert not (await judge(LocalSandbox(executor=executor), "")).judged
    assert len(executor.seen) == 1


async def test_identical_programs_run_once():
    executor = Scripted(DONE, DONE)
    program, other = Program("", ("assert f(1) == 1",)), Program("", ("assert f(1) == 1",), Limits(wall_seconds=3))
    sandbox = LocalSandbox(executor=executor)
    verdicts = await sandbox.run([program, other, program, program])
    assert len(executor.seen) == 2
    assert [v.status for v in verdicts] == ["passed"] * 4
    verdicts[0].tests[0].passed = False
    assert verdicts[2].tests[0].passed
    await sandbox.close()
    assert executor.closed == 1
    with pytest.raises(SandboxError, match="closed"):
        await sandbox.run([program])


@needs_layer
async def test_tests_that_say_nothing_here_are_no_score(sandbox):
    """For no program: what is refused is refused by the text of the test."""
    for test, reason in (
        ("from unittest.mock import patch\nwith patch('time.sleep'): assert f(1) == 1", "changes a module"),
        ("import nothing_like_it\nassert f(1) == 1", "needs nothing_like_it"),
        ("assert np.allclose(f(1), 1)", "needs numpy"),
        ("def test_it(monkeypatch):\n    assert f(1) == 1", "pytest's monkeypatch"),
    ):
        for code in ("def f(x): return x", "def f(x): return 2"):
            verdict = await judge(sandbox, code, "assert f(1) == 1", test)
            assert verdict.status == "unjudgeable"
            assert not verdict.judged
            assert reason in verdict.detail


@needs_layer
async def test_what_only_some_programs_make_impossible_is_their_failure(sandbox):
    code = "class N:\n    def __sub__(self, o): return 0\ndef f(x): return N()"
    verdict = await judge(sandbox, code, "assert abs(f(1) - 5) < 0.1")
    assert verdict.status == "failed"
    assert "not judgeable here, because" in verdict.detail


@needs_layer
async def test_a_descriptor_that_the_program_names_is_not_opened(sandbox):
    """It would be the judge's own: its channel, or what it writes its results to."""
    said = '[true,"",""]'
    message = "\\0\\0\\0" + chr(len(said)) + "B" + said
    tests = ("with open(path(), 'w') as h: h.write(text())", "assert f(1) == 2", "assert f(1) == 3")
    for descriptor, text in ((3, message * 3), (5, f"{said}\\n" * 3), (True, said)):
        code = f"def path(): return {descriptor}\ndef text(): return '{text}'\ndef f(x): return x"
        verdict = await judge(sandbox, code, *tests)
        assert passed(verdict) == [False] * 3, (descriptor, verdict)


@needs_layer
async def test_a_name_of_the_tests_is_never_the_programs(sandbox):
    code = "def helper(x): return 5\nclass math:\n    isclose = staticmethod(lambda *a: True)\ndef f(x): return 1\n"
    code += "class Fraction:\n    def __init__(s, *a): pass\n    def __eq__(s, o): return True\n"
    tests = (
        "raise OSError\ndef helper(x): return 7",
        "assert helper(f(1)) == 5",
        "assert math.isclose(f(1), 2)",
        "assert f(2) == Fraction(1, 2)",
    )
    verdict = await judge(sandbox, code, *tests)
    assert passed(verdict) == [False] * 4
    assert "another test should have set it" in verdict.tests[1].detail


@needs_layer
async def test_cases_that_the_program_empties_prove_nothing(sandbox):
    code = "def f(x):\n    if isinstance(x, list): x.clear()\n    return 1"
    shared = "cases = [(1, 2)]\nf(cases)\n"
    verdict = await judge(
        sandbox,
        code,
        shared + "assert all(f(a) == b for a, b in cases)",
        shared + "for a, b in cases: assert f(a) == b",
        shared + "for k, (a, b) in enumerate(cases): assert f(a) == b",
        "assert all(x for x in [])",
    )
    assert passed(verdict) == [False, False, False, True]
    assert "emptied" in verdict.tests[0].detail
    assert "held over nothing" in verdict.tests[3].detail


@needs_layer
async def test_what_reaches_the_log_moves_no_cursor(sandbox):
    code = "import sys\nprint('\\x1b[2Jout')\nsys.stderr.write('\\x9b1A')\ndef f(x): return '\\x1b]0;title'"
    verdict = await judge(sandbox, code, "assert f(1) == 'x'")
    assert verdict.stdout == "\\x1b[2Jout\n"
    assert not [c for text in (verdict.stdout, verdict.stderr, verdict.detail) for c in text if c in "\x1b\x9b\x07"]


@needs_layer
async def test_as_much_output_as_is_expected(sandbox):
    long = "\n".join(str(k) for k in range(400_000))
    assert len(long) > 2_000_000
    code = "print('\\n'.join(map(str, range(int(input())))))"
    assert (await judge(sandbox, code, IOTest("400000", long))).status == "passed"
    assert (await judge(sandbox, code, IOTest("400000", "1"))).status == "output_limit"


def test_auto_never_falls_back(monkeypatch):
    def refuse(*args, **kwargs):
        raise SandboxError("sandbox: this machine cannot isolate programs. layer A: no user namespaces")

    monkeypatch.setattr("mrl.sandbox.engine.client.IsolatedExecutor", refuse)
    monkeypatch.setattr(sys, "platform", "linux")
    with pytest.raises(SandboxError, match=r"(?s)no user namespaces.*mrl sandbox check.*sandbox: process"):
        make_auto()
    assert SANDBOXES.get("auto") is make_auto


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_other_systems_get_the_choices(monkeypatch, platform):
    monkeypatch.setattr(sys, "platform", platform)
    with pytest.raises(SandboxError, match=f"(?s){platform}.*Linux container.*remote sandbox.*sandbox: modal"):
        LocalSandbox()


KINDS = [
    ("def f(x): return x + {i}", "passed"),
    ("def f(x):\n    yield x + {i}", "failed"),
    ("import sys\nprint(sys.version)\ndef f(x): return x + {i}", "passed"),
    ("def f(x): return -{i} - 1", "failed"),
    ("import os; os._exit({i} % 2)", "exited"),
    ("class E:\n    def __eq__(self, o): return True\ndef f(x): return E(), {i}", "failed"),
    ("raise ValueError({i})", "error"),
    ("import ctypes; ctypes.string_at({i} % 2)", "crashed"),
    ("def f(x): return [0] * 10**10, {i}", "memory"),
    ("import os, time\ndef f(x):\n    os.closerange(3, 4096)\n    os._exit({i})", "exited"),
    ("import builtins\nbuiltins.eval = print\ndef f(x): return x + {i}", "passed or not"),
    (
        "import os\nfor k in range(3, 99):\n  try: os.write(k, b'V')\n  except OSError: pass\ndef f(x): return ({i},)",
        "wrong",
    ),
    (
        "import threading as t\ndef g():\n  while 1: 0\nt.Thread(target=g, daemon=True).start()\ndef f(x): return {i}",
        "any",
    ),
]


@needs_layer
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "count", [pytest.param(600, marks=pytest.mark.slow), pytest.param(10_000, marks=pytest.mark.soak)]
)
async def test_good_and_hostile_programs_while_supervisors_are_killed(count):
    seed = random.Random(4)
    order = [seed.randrange(len(KINDS)) for _ in range(count)]
    limits = Limits(wall_seconds=5.0, cpu_seconds=5.0)
    programs = [Program(KINDS[k][0].format(i=i), (f"assert f(0) == {i}",), limits) for i, k in enumerate(order)]
    fds, threads, others = len(os.listdir("/proc/self/fd")), threading.active_count(), set(children())
    sandbox = LocalSandbox(slots=2)
    await sandbox.run(programs[:50])
    killer = asyncio.create_task(kill_supervisors(seed, others))
    verdicts: list[Verdict] = []
    memory = []
    for start in range(0, count, count // 10):
        verdicts += await sandbox.run(programs[start : start + count // 10])
        memory.append(own_memory())
    killer.cancel()
    await sandbox.close()
    wrong = Counter()
    for k, verdict in zip(order, verdicts, strict=True):
        expected = KINDS[k][1]
        right = {
            "any": verdict.judged,
            "passed or not": verdict.judged,
            "wrong": verdict.judged and verdict.status != "passed",
        }
        if not right.get(expected, verdict.status == expected):
            wrong[KINDS[k][0], verdict.status, verdict.detail[:100]] += 1
    assert not wrong
    assert memory[-1] - memory[1] < 100
    assert len(os.listdir("/proc/self/fd")) <= fds + 2
    assert threading.active_count() <= threads + 2
    assert set(children()) <= others


async def kill_supervisors(seed: random.Random, others: set[int]) -> None:
    """At random moments, as the kernel might: no result may be lost or invented. others: processes that are none."""
    while True:
        await asyncio.sleep(seed.uniform(0.5, 3))
        victims = [child for child in children() if child not in others]
        if victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(seed.choice(victims), signal.SIGKILL)


def children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def own_memory() -> float:
    """Resident, in MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
