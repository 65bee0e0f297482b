"""The shapes of public data sets, each with solutions known to be right and wrong, graded in real isolation."""

import json

import pytest

from mrl.errors import DataError
from mrl.rewards.code import parse_tests
from mrl.sandbox import IOTest, Program
from mrl.sandbox.confine import selftest
from mrl.sandbox.local import LocalSandbox

needs_layer = pytest.mark.skipif(
    bool(selftest.unsupported()) or not any(selftest.test_layer(layer).holds for layer in "ABC"),
    reason="no layer of isolation works here",
)

OPC = [
    "assert second_largest([3, 1, 2]) == 2",
    "assert second_largest([5, 5, 4]) == 4",
    "assert second_largest([1]) is None",
    "assert second_largest([-1, -2]) == -2",
]
HUMANEVAL = """
METADATA = {'author': 'mrl', 'dataset': 'test'}


def check(candidate):
    assert candidate([1.0, 2.0, 3.9, 4.0, 5.0], 0.3) == True
    assert candidate([1.0, 2.0, 5.9, 4.0, 5.0], 0.05) == False
    assert candidate([], 1.0) == False, "nothing is close to nothing"
    assert abs(sum(map(float, [candidate([1, 1], 0.5)])) - 1.0) < 1e-6
    for values in ([1, 2], [2, 4]):
        assert not candidate(values, 0.1)


check(has_close)
"""
MBPP = ["assert set(shared((3, 4, 5), (5, 7, 4))) == set((4, 5))", "assert sorted(shared((1,), (1, 2))) == [1]"]
MBPP_SETUP = "import math\nassert math.isclose(area(2), 12.566370614359172, rel_tol=0.001)"
APPS_STDIO = {"inputs": ["3\n1 2 3\n", ["2", "5 5"]], "outputs": ["6\n", ["10"]]}
APPS_CALL = {"fn_name": "pairs", "inputs": [[[1, 2, 3], 4], [[], 1]], "outputs": [[[[1, 3]]], [[]]]}
LCB_STDIO = [{"input": "2\n4\n9\n", "output": "2\n3\n", "testtype": "stdin"}]
LCB_CALL = [
    {"input": "[2, 7, 11]\n9", "output": "[0, 1]", "testtype": "functional", "fn_name": "twoSum"},
    {"input": "[3, 3]\n6", "output": "[0, 1]", "testtype": "functional", "func_name": "twoSum"},
]

CASES = {
    "opc assert list": (
        OPC,
        "def second_largest(x):\n    s = sorted(set(x))\n    return s[-2] if len(s) > 1 else None",
        [("def second_largest(x): return sorted(x)[-2]", 2), ("def second_largest(x): return 2", 1), ("x = 1", 0)],
    ),
    "humaneval check": (
        HUMANEVAL,
        "def has_close(n, t):\n    n = sorted(n)\n    return any(b - a < t for a, b in zip(n, n[1:]))",
        [("def has_close(n, t): return len(n) > 3", 0), ("def has_close(n, t): return bool(n)", 0)],
    ),
    "mbpp wrapped": (
        MBPP,
        "def shared(a, b): return tuple(set(a) & set(b))",
        [("def shared(a, b): return a", 1), ("def shared(a, b): return tuple(set(a) | set(b))", 0)],
    ),
    "mbpp generator": (MBPP, "def shared(a, b):\n    for x in a:\n        if x in b: yield x", []),
    "mbpp isclose": (MBPP_SETUP, "def area(r): return 3.14159 * r * r", [("def area(r): return 3 * r * r", 0)]),
    "apps stdio": (
        APPS_STDIO,
        "n = int(input())\nprint(sum(map(int, input().split())))",
        [("print(6)", 1), ("import sys\nprint(sum(map(int, sys.stdin.read().split())))", 0), ("print(6)\nexit_now", 0)],
    ),
    "apps call": (
        json.dumps(APPS_CALL),
        "def pairs(x, s): return [(a, b) for i, a in enumerate(x) for b in x[i + 1:] if a + b == s]",
        [("def pairs(x, s): return []", 1), ("def pairs(x, s): return [[1, 3], [3, 1]] if x else []", 1)],
    ),
    "apps call of a class": (
        APPS_CALL,
        "class Solution:\n    def pairs(self, x, s): return [[1, 3]] if x else []",
        [("class Solution:\n    def pair(self, x, s): return []", 0)],
    ),
    "livecodebench stdio": (
        LCB_STDIO,
        "for _ in range(int(input())): print(round(int(input()) ** .5))",
        [("print(2)\nprint(4)", 0), ("print(2)", 0)],
    ),
    "livecodebench call": (
        json.dumps(LCB_CALL),
        "from typing import List\nclass Solution:\n    def twoSum(self, nums: List[int], target: int) -> List[int]:\n"
        "        seen = {}\n        for i, n in enumerate(nums):\n            if target - n in seen:\n"
        "                return seen[target - n], i\n            seen[n] = i",
        [
            ("class Solution:\n    def twoSum(self, n, t): return [n.index(t - n[0]), 0][::-1]", 1),
            ("def twoSum(n, t): return '[0, 1]'", 0),
        ],
    ),
    "numbers": (
        [{"input": "2\n", "output": "1.41421356237", "compare": "numbers"}],
        "print(f'{float(input()) ** .5:.7f}')",
        [("print(1.41)", 0)],
    ),
    "a shared set-up": (
        "data = [3, 1]\nexpected = sorted(data)\nassert order(data) == expected\nassert order([]) == []",
        "def order(x): return sorted(x)",
        [("def order(x): return x", 1), ("def order(x): x.sort()", 0)],
    ),
    "bigcodebench": (
        "import unittest\n\nclass TestCases(unittest.TestCase):\n    def test_case_1(self):\n"
        "        self.assertEqual(task_func([3, 1]), [1, 3])\n    def test_case_2(self):\n"
        "        with self.assertRaises(TypeError):\n            task_func(None)\n",
        "def task_func(x): return sorted(x)",
        [("def task_func(x): return x", 0), ("def task_func(x): return sorted(x or [])", 0)],
    ),
    "pytest functions": (
        ["def test_one():\n    assert f(1) == 2", "def test_two():\n    assert f(2) == 3"],
        "def f(x): return x + 1",
        [("def f(x): return 2", 1)],
    ),
    "in place": (
        ["x = [3, 1]\norder(x)\nassert x == [1, 3]"],
        "def order(x): x.sort()",
        [("def order(x): return sorted(x)", 0)],
    ),
    "an exception": (
        ["try:\n    half(3)\n    assert False\nexcept ValueError:\n    pass", "assert half(4) == 2"],
        "class Odd(ValueError): pass\ndef half(x):\n    if x % 2: raise Odd(x)\n    return x // 2",
        [("def half(x): return x / 2", 1), ("def half(x): raise KeyError", 0), ("def half(x): raise ValueError", 1)],
    ),
}


@needs_layer
async def test_right_and_wrong_solutions():
    sandbox = LocalSandbox()
    rows = []
    for name, (tests, right, wrong) in CASES.items():
        parsed = parse_tests(tests)
        rows += [(name, right, parsed, len(parsed))] + [(name, code, parsed, passed) for code, passed in wrong]
    try:
        verdicts = await sandbox.run([Program(code, parsed) for _, code, parsed, _ in rows])
    finally:
        await sandbox.close()
    found = [
        (name, code, sum(test.passed for test in v.tests)) for (name, code, _, _), v in zip(rows, verdicts, strict=True)
    ]
    assert found == [(name, code, passed) for name, code, _, passed in rows]
    for (_, _, parsed, passed), verdict in zip(rows, verdicts, strict=True):
        assert (verdict.status == "passed") is (passed == len(parsed))


def test_shapes():
    assert parse_tests(APPS_STDIO) == (IOTest("3\n1 2 3\n", "6\n"), IOTest("2\n5 5", "10"))
    assert parse_tests(LCB_CALL)[0] == "import json\nassert json.loads(json.dumps(twoSum([2, 7, 11], 9))) == [0, 1]"
    assert parse_tests([{"input": "", "output": "1", "compare": "exact"}]) == (IOTest("", "1", "exact"),)


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ({"inputs": ["1"], "outputs": []}, "same length"),
        ({"inputs": [1], "outputs": ["1"]}, "lists of lines"),
        ({"inputs": [1], "outputs": [1], "fn_name": "f"}, "no list"),
        ({"inputs": [[1]], "outputs": [1], "fn_name": "os.system('x')"}, "no name"),
        ([{"input": "1", "output": "1", "testtype": "functional"}], 'with an "fn_name"'),
        ([{"input": "x", "output": "1", "testtype": "functional", "fn_name": "f"}], "are JSON"),
        ([{"input": "x", "output": "1", "compare": "roughly"}], "test 0: compare: 'roughly' is not one of lines"),
        ([{"input": "x", "output": "1", "tolerance": -1}], "tolerance: -1"),
    ],
)
def test_what_cannot_be_read(tests, message):
    with pytest.raises(DataError, match=message.replace("(", r"\(")):
        parse_tests(tests)
