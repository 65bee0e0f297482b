"""Good and hostile programs, in every layer there is here."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable

import pytest

from mrl.sandbox.base import Limits
from mrl.sandbox.engine.client import IsolatedExecutor
from tests.sandbox.asking import NOTHING, Call, Seen, execution, seen

Run = Callable[..., Seen]

F = "def f(x):\n    return x\n"


def test_calls_are_answered_in_order(run: Run) -> None:
    values = (None, True, 1, 2**100, 1.5, "é\0", b"\xff", (1, [2, {3}]), {1: {(2,): {3}}}, 1j)
    found = run(F, *(Call("f", (value,)) for value in values))
    assert found.status == "done"
    assert [answer.value for answer in found.answers] == list(values)
    assert [type(answer.value) for answer in found.answers] == [type(value) for value in values]


def test_what_a_call_raises_or_cannot_give(run: Run) -> None:
    code = "class E(ValueError): pass\ndef f(): raise E('no')\ndef g(): return object()\ndef h(a, *, b): return a - b"
    found = run(code, Call("f"), Call("g"), Call("h", (5,), (("b", 3),)), Call("nope"), Call("f"))
    assert found.status == "done"
    assert found.answers[0].bases[:2] == ("E", "ValueError")
    assert "no" in found.answers[0].detail
    assert found.answers[1].value == NOTHING
    assert found.answers[2].value == 2
    assert found.answers[3].type_name == "NameError"


def test_scripts_read_and_print(run: Run) -> None:
    found = run("import sys\nprint(sum(map(int, input().split())))\nsys.stderr.write('e')", stdin="1 2 3\n")
    verdict = found.verdict
    assert (found.status, verdict.stdout, verdict.stderr, found.exit_code) == ("done", "6\n", "e", 0)
    assert run("import atexit\natexit.register(lambda: print('bye'))\nraise SystemExit").verdict.stdout == "bye\n"
    assert run("import sys; sys.exit(3)").status == "exited"
    assert run("input()").verdict.detail.startswith("EOFError")


@pytest.mark.parametrize(
    "leave", ["import os; os._exit(0)", "raise SystemExit(0)", "import sys; sys.exit(0)", "raise SystemExit"]
)
def test_leaving_is_no_answer(run: Run, leave: str) -> None:
    found = run(leave, Call("f"))
    assert found.status == "exited"
    assert found.answers[0].kind == "unanswered"


def test_answers_before_a_crash_count(run: Run) -> None:
    code = F + "def crash():\n    import ctypes\n    ctypes.string_at(0)\n"
    found = run(code, Call("f", (1,)), Call("crash"), Call("f", (2,)))
    assert (found.status, found.signal) == ("crashed", 11)
    assert [answer.kind for answer in found.answers] == ["value", "unanswered", "unanswered"]


ENDS = [
    ("while True: pass", "timeout"),
    ("import time; time.sleep(60)", "timeout"),
    ("import signal\nfor s in range(1, 65):\n  try: signal.signal(s, signal.SIG_IGN)\n  except Exception: pass\n"
     "while True: pass", "timeout"),
    ("x = bytearray(10**10)", "memory"),
    ("x = []\nwhile True: x.append('x' * 10**6)", "memory"),
    ("while True: print('x' * 10000)", "output_limit"),
    ("import os\nwhile True: os.write(2, b'x' * 60000)", "output_limit"),
    ("1 / 0", "error"),
    ("def f(:", "error"),
    ("def f(n): return f(n + 1)\nf(0)", "error"),
    ("import os\nos.fork()", "error"),
    *((f"import os\nos.write({fd}, {data!r})", "protocol") for fd in (3, 4) for data in (
        bytes(5), b"\xff" * 5, b"\0\0\0\x12V" + b"0" * 16 + b"{}", b"\0\0\0\2D[]", b"\0\0\0\2B[]")),
]  # fmt: skip


def test_ends(executor: IsolatedExecutor) -> None:
    """Side by side, as many as there are slots."""

    def limits(code: str, status: str) -> Limits:
        """What ignores the signal of its processor time is killed by the kernel, which on a busy machine counts
        otherwise than its own record of it: there the clock ends it. What is to reach another limit gets the time."""
        if status != "timeout":
            return Limits(wall_seconds=30, cpu_seconds=20, memory_mb=256)
        return Limits(wall_seconds=1.5, cpu_seconds=5 if "SIG_IGN" in code else 1, memory_mb=256)

    executions = [execution(code, [Call("f")], limits(code, status)) for code, status in ENDS]
    for (code, status), one in zip(ENDS, asyncio.run(executor.execute(executions)), strict=True):
        assert seen(one).status == status, (code, one)


def test_a_thousand_threads_are_refused(run: Run) -> None:
    code = (
        "import threading\n"
        "def f(n):\n    e = threading.Event()\n    t = [threading.Thread(target=e.wait) for _ in range(n)]\n"
        "    try:\n        for x in t: x.start()\n    finally:\n        e.set()\n    return n\n"
    )
    found = run(code, Call("f", (8,)), Call("f", (1000,)))
    assert found.answers[0].value == 8
    assert found.answers[1].type_name == "RuntimeError"


def test_descriptors_and_scratch_are_limited(run: Run) -> None:
    code = (
        "import os\n"
        "def dups():\n    n = 0\n    try:\n        while True: os.dup(0); n += 1\n    except OSError: return n\n"
        "def fill():\n    n = 0\n    try:\n        while True:\n"
        "            with open(f'f{n}', 'wb') as f: f.write(bytes(1 << 20))\n"
        "            n += 1\n    except OSError: return n\n"
    )
    found = run(code, Call("dups"), Call("fill"))
    assert found.answers[0].value < 64
    assert found.answers[1].value <= 16


def test_later_arguments_are_not_there_yet(run: Run) -> None:
    """Everything the process can read of its channels before the first call was answered."""
    code = (
        "import os, time, select\n"
        "def peek(_):\n    return select.select([3, 4], [], [], 0.1)[0]\n"
        "early = select.select([3], [], [], 0.1)[0]\n"
        "def first(): return early\n"
    )
    found = run(code, Call("first"), Call("peek", ("a",)), Call("peek", ("b",)))
    assert [answer.value for answer in found.answers] == [[], [], []]


@pytest.mark.parametrize("kind", "VXn")
def test_an_answer_written_ahead_is_refused(run: Run, kind: str) -> None:
    body = b'["' + b"0" * 16 + b'", [], 1, [], [], ""]'
    message = len(body).to_bytes(4, "big") + kind.encode() + body
    code = f"import os\ndef f():\n    os.write(4, {message!r})\n    return 1\n"
    assert run(code, Call("f"), Call("f")).status == "protocol"


def test_nothing_survives_into_the_next_execution(run: Run) -> None:
    poison = (
        "import builtins, sys, json, os\nbuiltins.len = lambda x: 99\nsys.modules['math'] = None\n"
        "json.dumps = None\nsys.setrecursionlimit(50)\nos.write = None\n"
        "try: open('left', 'w').write('x')\nexcept OSError: pass\n"
        "SECRET = 'earlier-' + 'program'\n"
    )
    run(poison)
    code = (
        "import math, os, gc\n"
        "def f(): return [len([1]), math.pi > 3, os.path.exists('left')]\n"
        "def left(): return [o for o in gc.get_objects() if type(o) is dict and 'SECRET' in o] != []\n"
    )
    found = run(code, Call("f"), Call("left"))
    assert [answer.value for answer in found.answers] == [[1, True, False], False]


def test_the_same_program_does_the_same_thing(run: Run) -> None:
    code = "import random\ndef f(): return [random.random(), hash('a'), list({'a', 'b', 'c'})]"
    found = run(code, Call("f"))
    assert found.answers == run(code, Call("f")).answers
    command = [sys.executable, "-c", "print(hash('a'))"]
    elsewhere = subprocess.run(command, env={"PYTHONHASHSEED": "0"}, capture_output=True, text=True, check=True)
    assert found.answers[0].value[1] == int(elsewhere.stdout)  # in another slot's interpreter it is the same too
