"""Trusted tests in a second process, the program's objects behind proxies."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from mrl.sandbox.base import Limits, Verdict
from mrl.sandbox.engine.client import IsolatedExecutor
from mrl.sandbox.execution import Execution

QUICK = Limits(wall_seconds=5, cpu_seconds=5)
CODE = """
import math, enum
from math import isclose as close
from collections import namedtuple
class Empty(ValueError): pass
class Stack:
    def __init__(self, *items): self.items = list(items)
    def push(self, x): self.items.append(x)
    def pop(self):
        if not self.items: raise Empty("nothing there")
        return self.items.pop()
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __getitem__(self, at): return self.items[at]
    def __eq__(self, other): return isinstance(other, Stack) and self.items == other.items
    def __lt__(self, other): return len(self) < len(other)
    def __add__(self, other): return Stack(*self.items, *other.items)
    def __enter__(self): return self
    def __exit__(self, *_): self.items.clear()
Point = namedtuple("Point", "x y")
Colour = enum.IntEnum("Colour", "RED BLUE")
def sort(items): items.sort()
def apply(f, *args): return f(*args)
def counting():
    n = 0
    while True:
        yield n
        n += 1
async def later(x): return x + 1
def keyed(): raise KeyError("k")
def leave(): raise SystemExit(0)
"""
EVIL = """
import math
math.isclose = lambda *a, **k: True
class Evil:
    def __getattr__(self, name): return Evil()
    for _name in "eq ne lt le gt ge contains instancecheck".split():
        locals()[f"__{_name}__"] = lambda *a: True
    for _name in "add sub mul truediv mod radd rsub rmul rtruediv and rand abs neg".split():
        locals()[f"__{_name}__"] = lambda *a: 0.0
    __hash__ = lambda self: 5
def f(*a): return Evil()
all = any = isinstance = len = lambda *a: True
AssertionError = None
class L(list):
    __eq__ = lambda *a: True
class F(float):
    __eq__ = lambda *a: True
    __sub__ = __rsub__ = lambda *a: F(0)
def lists(): return L([1])
def floats(): return F(1)
"""


@pytest.fixture(scope="module")
def executor() -> Iterator[IsolatedExecutor]:
    executor = IsolatedExecutor(slots=1)
    yield executor
    executor.shutdown()


def run(executor: IsolatedExecutor, code: str, *blocks: str, limits: Limits = QUICK) -> Verdict:
    return asyncio.run(executor.execute([Execution(code, blocks, limits)]))[0].verdict


def kinds(verdict: Verdict) -> list[str]:
    """Of each test: it held, it did not, or it was not reached."""
    return ["value" if t.passed else "unanswered" if t.detail == "not reached" else "raised" for t in verdict.tests]


HOLDING = [
    "s = Stack(1)\ns.push(2)\nassert len(s) == 2 and s.pop() == 2 and s[0] == 1 and list(s) == [1] and 1 in s",
    "try:\n    Stack().pop()\n    assert 0\nexcept Empty as e:\n    assert 'nothing' in str(e)",
    "import unittest\nwith unittest.TestCase().assertRaises(Empty): Stack().pop()",
    "try: Stack().pop()\nexcept ValueError: pass",
    "try: keyed()\nexcept KeyError: pass",
    "assert Point(1, 2) == (1, 2) and Point(1, 2).y == 2 and (1, 2) == Point(1, 2)",
    "assert Colour.BLUE == 2 and Colour.BLUE - 1 == 1 and Colour.RED < 2",
    "assert Stack(1) == Stack(1) and Stack(1) != Stack(2) and Stack() is not Stack()",
    "assert Stack(1) + Stack(2) == Stack(1, 2)",
    "assert isinstance(Stack(), Stack) and not isinstance(3, Stack) and not isinstance(Stack(), list)",
    "a = [3, 1, 2]\nsort(a)\nassert a == [1, 2, 3]",
    "assert apply(lambda a, b: a * b, 6, 7) == 42 and apply(lambda s: s.pop(), Stack(9)) == 9",
    "def bad(): raise IndexError('i')\ntry: apply(bad)\nexcept IndexError: pass",
    "import itertools\nassert list(itertools.islice(counting(), 3)) == [0, 1, 2]",
    "import asyncio\nasync def main(): return await later(1)\nassert asyncio.run(main()) == 2",
    "assert math.isclose(0.1 + 0.2, 0.3) and close(1, 1) and math.pi > 3",
    "with Stack(1, 2) as s: assert len(s) == 2\nassert len(s) == 0",
    "def check(candidate):\n    assert candidate(5).items == [5]\ncheck(Stack)",
    "assert sorted([Stack(1, 2), Stack(1)])[0] == Stack(1) and [x.items for x in apply(lambda: [Stack(7)])] == [[7]]",
    "try: leave()\nexcept SystemExit as e: assert e.code == 0",
]
FAILING = [
    "assert Stack(1) == Stack(2)", "assert len(Stack()) == 1", "nope()", "Stack().pop()",
    "assert Point(1, 2) == [1, 2]",
    "raise SystemExit(0)", "leave()", "assert Colour.RED == 2", "import os\nos.fork()", "apply(open, '/etc/passwd')",
]  # fmt: skip


def test_what_holds_and_what_does_not(executor: IsolatedExecutor) -> None:
    seen = run(executor, CODE, *HOLDING, *FAILING)
    for block, test in zip(HOLDING + FAILING, seen.tests, strict=True):
        assert test.passed is (block in HOLDING), (block, test)


@pytest.mark.parametrize(
    "block",
    [
        "assert f(1) == 2", "assert not f(1) != 2", "assert f(1) in [1, 2]", "assert 2 in f(1)", "assert f(1) > 2",
        "assert abs(f(1) - 2) < 0.1", "assert 2 - f(1) == 0", "assert abs(f(1).x - 3) < 1", "assert f(1) == [f, 1]",
        "assert math.isclose(f(1), 2)", "assert all([f(1) == 2])", "assert isinstance(f(1), int)",
        "assert len([f]) == 2",
        "assert f(1) is None", "assert {f(1)} == {5}", "assert f(1) / 2 == 0", "assert -f(1) == 2",
        "import unittest\nunittest.TestCase().assertAlmostEqual(f(1), 3)", "assert lists() == [2]",
        "assert [2] == lists()",
        "assert floats() == 2", "assert abs(floats() - 3) < 0.1", "assert str(f(1)) == '2'", "assert [*f(1)] == [1]",
    ],
)  # fmt: skip
def test_objects_that_answer_true_to_everything_pass_nothing(executor: IsolatedExecutor, block: str) -> None:
    seen = run(executor, EVIL, block, "assert 1 == 1")
    assert not seen.tests[0].passed, seen
    assert seen.tests[1].passed


SWALLOWING = """
class Swallow:
    def __enter__(self): return self
    def __exit__(self, *_): return True
    def one(self): return 1
    def fail(self): raise ValueError
"""


@pytest.mark.parametrize(
    ("code", "block"),
    [
        ("def f(x): raise StopIteration", "for got, want in zip(map(f, [1]), [2]): assert got == want"),
        ("def f(x): raise StopIteration", "assert all(map(lambda x: f(x) == 2, [1]))"),
        ("class S(StopIteration): pass\ndef f(x): raise S", "assert list(map(f, [1])) == []"),
        ("class S(StopAsyncIteration): pass\ndef f(x): raise S", "try: f(1)\nexcept StopAsyncIteration: pass"),
        (SWALLOWING, "with Swallow() as s: assert s.one() == 2"),
        (SWALLOWING, "with Swallow() as s:\n    s.fail()\n    assert s.one() == 2"),
        ("from unittest.mock import _ANY as f", "assert f() == 2"),
        ("from unittest.mock import MagicMock as f", "assert isinstance(f(3), int)"),
        ("from unittest import mock as m", "assert m.ANY == 2"),
        ("from contextlib import suppress as C\nE = BaseException", "with C(BaseException): assert 1 == 2"),
        ("def f(g):\n  try: g(1)\n  except AssertionError: pass", "def want(x): assert x == 5\nf(want)"),
    ],
)
def test_no_assertion_is_passed_over(executor: IsolatedExecutor, code: str, block: str) -> None:
    seen = run(executor, code, block, "assert 1 == 1")
    assert kinds(seen) == ["raised", "value"], seen


def test_a_callbacks_assertion_that_comes_back_can_be_expected(executor: IsolatedExecutor) -> None:
    block = "def bad(): assert 0\ntry: apply(bad)\nexcept AssertionError: pass\nassert apply(lambda: 3) == 3"
    seen = run(executor, CODE, block)
    assert seen.tests[0].passed, seen


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("def f(): import os; os._exit(0)", "exited"),
        ("def f():\n  while True: pass", "timeout"),
        ("def f(): import os; os.write(3, b'\\0\\0\\0\\2V[]'); [].pop()", "protocol"),
        ("import os; os.write(3, b'\\0\\0\\0\\2B[]')", "protocol"),
        ("def f(): import os; os.write(3, b'\\0\\0\\0\\2B[]')", "protocol"),
        ("def f(): import os; os.write(3, b'\\0\\0\\0\\0D')", "protocol"),
        ("import os; os.write(3, b'\\0\\0\\0\\1Sx')", "protocol"),
        ("def f(): import os; os.write(3, b'\\0\\0\\0\\1Sx')", "protocol"),
        ("1 / 0", "error"),
        ("raise SystemExit(0)", "exited"),
        ("def f():\n  import ctypes\n  ctypes.string_at(0)", "crashed"),
    ],
)
def test_a_program_that_breaks_off_passes_nothing_more(executor: IsolatedExecutor, code: str, status: str) -> None:
    seen = run(executor, code, "f()", "assert True", limits=Limits(wall_seconds=1, cpu_seconds=5))
    assert seen.status == status, seen
    assert "value" not in kinds(seen)
    assert len(seen.tests) == 2


def test_blocks_before_the_end_count(executor: IsolatedExecutor) -> None:
    seen = run(executor, "def f(x):\n  import os\n  return x or os._exit(0)", "assert f(1) == 1", "f(0)", "assert 1")
    assert kinds(seen) == ["value", "unanswered", "unanswered"]
