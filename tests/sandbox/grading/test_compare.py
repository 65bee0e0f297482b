"""Values, exceptions and output compared outside the program's process."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.sandbox.base import IOTest, Program
from mrl.sandbox.execution import Answer, Observation
from mrl.sandbox.grading import compare_output, judge
from mrl.sandbox.grading.compare import exception_matches, is_plain, show


class Liar(int):
    def __eq__(self, other):
        return True

    __hash__ = int.__hash__


def test_only_exact_builtin_types_are_compared():
    async def answer(execution):
        return Observation("done", [Answer("value", Liar(1)), Answer("value", [Liar(1)])])

    verdict = asyncio.run(judge(Program("", ("assert f(1) == 2", "assert f(2) == [2]")), answer))
    assert [t.passed for t in verdict.tests] == [False, False]
    assert not is_plain({"a": [Liar(1)]})
    assert is_plain({"a": [1, (None, {2.0, "x"}), b"", 1j, frozenset()]})
    assert len(show("x" * 10**6)) < 400
    assert show(10**9999) == "<int>" or len(show(10**9999)) < 400


@pytest.mark.parametrize(
    ("raised", "wanted", "matches"),
    [
        ("ValueError", ["ValueError"], True),
        ("UnicodeDecodeError", ["ValueError"], True),
        ("KeyError", ["ValueError"], False),
        ("Mine", ["Mine"], True),
        ("pkg.Mine", ["Mine"], True),
        ("Mine", ["Exception"], True),
        ("Mine", ["ValueError"], None),
        ("KeyError", ["Mine", "LookupError"], True),
    ],
)
def test_exception_names(raised, wanted, matches):
    assert exception_matches(raised, wanted) is matches


@pytest.mark.parametrize(
    ("compare", "expected", "got", "equal"),
    [
        ("lines", "1\n2\n", "1 \n2\n\n", True),
        ("lines", "1 2", "1  2", False),
        ("exact", "1\n", "1\n", True),
        ("exact", "1\n", "1", False),
        ("tokens", "1 2\n3", "1\n2   3\n", True),
        ("tokens", "1 2", "1 2 3", False),
        ("tokens", "1.0", "1", False),
        ("numbers", "1.0 x", "1 x", True),
        ("numbers", "0.333333333", "0.3333334", True),
        ("numbers", "0.33", "0.34", False),
        ("numbers", "100000000000000000000", "100000000000000000001", False),
        ("numbers", "nan", "nan", True),
        ("numbers", "1", "nan", False),
        ("numbers", "1e999999", "inf", True),
        ("numbers", "1", "1_0", False),
        ("numbers", "1" * 500, "1" * 500, True),
        ("numbers", "1" * 300, "1.5", False),
        ("numbers", "yes", "no", False),
    ],
)
def test_output(compare, expected, got, equal):
    reason = compare_output(IOTest("", expected, compare), got)
    assert (reason == "") is equal
    assert len(reason) < 600


@settings(max_examples=100, deadline=None)
@given(st.text("1 .\nea-", max_size=12), st.text("1 .\nea-", max_size=12))
def test_looser_comparisons_accept_more(first, second):
    accepted = [not compare_output(IOTest("", first, how), second) for how in ("exact", "lines", "tokens", "numbers")]
    assert accepted == sorted(accepted)
    assert not compare_output(IOTest("", first, "exact"), first)
