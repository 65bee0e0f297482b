"""What a script printed against what it should have."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.sandbox.judge import outputs


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
    reason = outputs.compare(compare, 1e-6, expected, got)
    assert (reason == "") is equal
    assert len(reason) < 600


@settings(max_examples=100, deadline=None)
@given(st.text("1 .\nea-", max_size=12), st.text("1 .\nea-", max_size=12))
def test_looser_comparisons_accept_more(first, second):
    accepted = [not outputs.compare(how, 1e-6, first, second) for how in ("exact", "lines", "tokens", "numbers")]
    assert accepted == sorted(accepted)
    assert not outputs.compare("exact", 0, first, first)
