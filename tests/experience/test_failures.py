"""Failures in few lines: by what was raised, not by row."""

from __future__ import annotations

import pytest

from mrl.errors import TrainingError
from mrl.experience.failures import LONGEST, check_failures, group_causes, in_lines, in_one_line
from tests.experience.example_groups import config, groups


def told(*messages: str) -> str:
    return in_one_line(group_causes((message, 1) for message in messages))


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        (["f gave nan, not a finite number"] * 2, "f gave nan, not a finite number"),
        (["f: row 1 is nan", "f: row 3 is nan"], "f: row … is nan"),
        (["f raised KeyError: 'gold'", 'f raised KeyError: "silver"'], "f raised KeyError: …"),
        (["f raised E: at 0x7f12 in 'a'", "f raised E: at 0x80aa in 'a'"], "f raised E: at … in 'a'"),
        (["int() with base 10: 'x'", "int() with base 10: 'y'"], "int() with base 10: …"),
        (["f_1 raised E", "f_2 raised E"], "1 x f_1 raised E; 1 x f_2 raised E"),
        (["f raised E: 'a'", "f raised F: 'a'"], "1 x f raised E: 'a'; 1 x f raised F: 'a'"),
        (["f raised E: one\n  two"], "f raised E: one two"),
    ],
)  # fmt: skip
def test_messages_that_differ_in_numbers_and_quoted_texts_are_one_cause(messages: list[str], expected: str) -> None:
    assert told(*messages) == expected


def test_the_most_frequent_come_first_and_the_rest_is_counted() -> None:
    causes = group_causes([("a", 1), ("b", 5), (None, 2), ("c", 1), ("d", 1000)])
    assert in_lines(causes) == "  1,000 x d\n  5 x b\n  2 x no reason was given\n  2 x 2 other causes"
    assert len(told("x" * 1000)) == LONGEST


def test_too_many_failures_end_the_run_with_their_causes_counted() -> None:
    check_failures(groups(), config(max_failed_fraction=0.5), step=3)
    with pytest.raises(TrainingError, match=r"step 3: 1 of 7 rollouts.*\n  1 x broken"):
        check_failures(groups(), config(max_failed_fraction=0.1), step=3)
