"""Code tests as a reward: taking code and tests out of text, and what verdicts are worth."""

import asyncio
import json
import time
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrl.errors import DataError, RewardError
from mrl.rewards import (
    RewardRequest,
    compute_reward,
    compute_reward_with_partial_credit,
    extract_code,
    parse_tests,
    reward_helper_function,
)
from mrl.rewards.code import CodeReward, PartialCodeReward
from mrl.rewards.combine import score_rows
from mrl.sandbox import IOTest, Limits, Program, TestResult, Verdict

FENCE = "```"
ADD = "def add(a, b):\n    return a + b"
TESTS = "assert add(1, 2) == 3\nassert add(2, 2) == 5"


@dataclass
class FakeSandbox:
    """A stand-in that answers with given verdicts: a sandbox that fails cannot be had on demand."""

    verdicts: list[Verdict]
    name: str = "fake"
    seen: list[Program] = field(default_factory=list)

    async def run(self, programs: list[Program]) -> list[Verdict]:
        self.seen += programs
        return self.verdicts[: len(programs)]

    async def close(self) -> None: ...


def request(completion, **columns) -> RewardRequest:
    return RewardRequest("r", "p", completion, [1], columns)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("x = 1", "x = 1"),
        (f"Sure:\n{FENCE}python\nx = 1\n{FENCE}\nDone.", "x = 1"),
        (f"{FENCE}python\nx = 1\n{FENCE}\n{FENCE}py\nx = 2\n{FENCE}", "x = 2"),
        (f"{FENCE}python\nx = 1\n{FENCE}\nOutput:\n{FENCE}\n3\n{FENCE}\n{FENCE}bash\nls\n{FENCE}", "x = 1"),
        (f"{FENCE}\nx = 1\n{FENCE}\n{FENCE}\nx = 2\n{FENCE}", "x = 2"),
        (f"{FENCE}python\nx = 1", "x = 1"),
        (f"{FENCE}python\nx = 1\n{FENCE}\n{FENCE}python\nx = ", "x = 1"),
        (f"1. Here: {FENCE}Python3\nx = 1\nreturn x{FENCE}", "x = 1\nreturn x"),
        (f"  - a\n    {FENCE}python\n    if 1:\n        x = 1\n    {FENCE}", "if 1:\n    x = 1"),
        ("~~~python\nx = 1\n~~~", "x = 1"),
        (f"{FENCE}{FENCE}", ""),
        ("", ""),
    ],
)
def test_extract_code(text, code):
    assert extract_code(text) == code


@given(st.text(max_size=60), st.text(st.characters(exclude_characters="`~", exclude_categories=["C", "Z"])))
def test_extract_code_finds_the_block(before, code):
    assert extract_code(f"{before.replace('`', '').replace('~', '')}\n{FENCE}python\n{code}\n{FENCE}\n") == code


@given(st.text(st.sampled_from("`~python \n"), max_size=60))
def test_extract_code_never_fails(text):
    assert isinstance(extract_code(text), str)


def test_parse_tests():
    assert parse_tests(TESTS) == ("assert add(1, 2) == 3\n", "assert add(2, 2) == 5")
    assert parse_tests("x = 1\nassert f(x)\n\nfor y in [1]:\n    g(y)\n") == (
        "x = 1\nassert f(x)\n",
        "\nfor y in [1]:\n    g(y)\n",
    )
    assert parse_tests("assert f(\n  1,\n)\ndef unused(): pass") == ("assert f(\n  1,\n)\n",)
    assert parse_tests(["assert a", "b()"]) == ("assert a", "b()")
    io = [{"input": "1", "output": "2"}, {"input": "", "output": "", "testtype": "stdin"}]
    assert parse_tests(io) == parse_tests(json.dumps(io)) == (IOTest("1", "2"), IOTest("", ""))
    assert parse_tests(json.dumps(["assert a"])) == ("assert a",)
    assert parse_tests("[f(x) for x in y]") == ("[f(x) for x in y]",)


@pytest.mark.parametrize(
    ("testcase", "message"),
    [
        ("", "no test"),
        ("def check(f):\n    assert f(1)", "no test"),
        ("x = 1", "no test"),
        ("assert f(", "not Python"),
        ([], "empty"),
        (None, "NoneType"),
        (3, "int"),
        ([3], "test 0 is neither"),
        ([{"input": "1"}], "test 0 is neither"),
        ([{"input": ["1"], "output": ["2"]}], "test 0 is neither"),
        ([{"input": "1", "output": "2", "testtype": "functional"}], "functional"),
        (["assert a", "x = 1"], "test 1 asserts nothing"),
        ('{"inputs": [], "outputs": []}', "same length"),
        ('{"input": "", "output": ""}', "got dict"),
    ],
)
def test_malformed_tests_are_data_errors(testcase, message):
    with pytest.raises(DataError, match=r"testcases of row 7: .*" + message):
        parse_tests(testcase, row=7)
    with pytest.raises(DataError, match=message):
        compute_reward("x = 1", testcase)


def test_compute_reward():
    assert compute_reward(ADD, "assert add(1, 2) == 3") == 1.0
    assert compute_reward(ADD, TESTS) == 0.0
    assert compute_reward_with_partial_credit(ADD, TESTS) == 0.5
    messages = [
        {"role": "assistant", "content": "thinking"},
        {"role": "tool", "content": "x"},
        {"role": "assistant", "content": [{"type": "text", "text": f"{FENCE}python\n{ADD}\n{FENCE}"}]},
        {"role": "user", "content": "thanks"},
    ]
    assert compute_reward(messages, ["assert add(1, 2) == 3"]) == 1.0
    assert compute_reward([], TESTS) == 0.0
    assert compute_reward("import sys; sys.exit(0)", TESTS) == 0.0
    assert compute_reward_with_partial_credit("import os; os._exit(0)", TESTS) == 0.0
    assert compute_reward("print(input())", [{"input": "3", "output": "3"}]) == 1.0
    start = time.monotonic()
    assert compute_reward("while True: pass", TESTS, limits=Limits(wall_seconds=0.5)) == 0.0
    assert time.monotonic() - start < 5


async def test_helper_works_inside_a_running_loop():
    assert reward_helper_function([ADD, "x = 1", ADD], ["assert add(1, 1) == 2"] * 3) == [1.0, 0.0, 1.0]
    with pytest.raises(DataError, match="2 completions but 1 testcases"):
        reward_helper_function([ADD, ADD], ["assert add"])
    with pytest.raises(DataError, match="row 1"):
        reward_helper_function([ADD, ADD], ["assert add", "x = 1"])


def test_a_failure_of_the_sandbox_is_never_a_score():
    failed = FakeSandbox([Verdict("sandbox_error", detail="no slots")] * 2)
    assert compute_reward(ADD, TESTS, sandbox=failed) is None
    assert compute_reward_with_partial_credit(ADD, TESTS, sandbox=failed) is None
    assert reward_helper_function([ADD] * 2, [TESTS] * 2, sandbox=failed) == [None, None]


@pytest.mark.parametrize("status", ["failed", "timeout", "memory", "crashed", "killed", "exited", "protocol", "error"])
def test_everything_judged_is_a_score(status):
    sandbox = FakeSandbox([Verdict(status, [TestResult(True), TestResult(status != "failed")])])
    assert compute_reward(ADD, TESTS, sandbox=sandbox) == 0.0
    assert compute_reward("x", TESTS, sandbox=FakeSandbox([Verdict("passed", [])])) == 0.0


async def test_code_reward_of_a_batch():
    verdicts = [
        Verdict("passed", [TestResult(True)] * 2),
        Verdict("timeout", [TestResult(True), TestResult(False, "not reached")], detail="no end after 10 s"),
        Verdict("sandbox_error", detail="fork failed"),
    ]
    sandbox = FakeSandbox(verdicts)
    rewards = [CodeReward(sandbox, Limits(memory_mb=64)), PartialCodeReward(sandbox)]
    requests = [request(ADD, testcases=TESTS), request(ADD, testcase=TESTS), request(ADD, testcases=TESTS)]
    report = await score_rows(rewards, [*requests, request(ADD, testcases="x = 1")])
    assert [r.rewards["sandbox"] for r in report.results] == [1.0, 0.0, None, None]
    assert [r.rewards["sandbox_partial"] for r in report.results] == [1.0, 0.5, None, None]
    assert [r.reward for r in report.results] == [1.0, 0.25, None, None]
    assert report.results[2].error is not None
    assert "fork failed" in report.results[2].error
    assert report.results[3].error is not None
    assert "testcases of row 3: there is no test" in report.results[3].error
    assert report.results[1].extra["verdict"]["status"] == "timeout"
    assert report.results[1].extra["verdict"]["failing"] == "test 1: not reached"
    assert report.results[3].extra["verdict"] is None
    assert report.metrics["sandbox/timeout"] == pytest.approx(1 / 3)
    assert report.metrics["sandbox/memory"] == 0
    assert sandbox.seen[0].limits.memory_mb == 64


def test_code_reward_needs_a_column():
    with pytest.raises(RewardError, match=r"'testcases'.*among the columns: answer, level"):
        CodeReward().check_columns(["answer", "level"])
    CodeReward().check_columns(["testcase"])
    with pytest.raises(RewardError, match="among the columns: answer"):
        asyncio.run(score_rows([CodeReward()], [request(ADD, answer=1)]))
