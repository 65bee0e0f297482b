"""Texts of 100 kB made to be slow to read, for everything of ours that reads what a model or its program wrote."""

from __future__ import annotations

import re
import signal
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrl.experience.failures import group_causes
from mrl.rewards import extract_code
from mrl.rewards.code import _dedent, _opening
from mrl.rewards.reasoning_gym import extract_answer
from mrl.sandbox.judge.outputs import compare
from mrl.tracking.console import _CONTROL
from tests.soak import slow_but

SIZE = 100_000
SECONDS = 10
"""Linear time takes some hundredths of a second; the square of the length, minutes."""

UNITS = [
    *(" ", "\t", "\n", " \n", "a", "0", "1.", "-", "_", "'", '"', "'\"", "0x", "0xf", "1e", "\x1b[", "\\", "#"),
    *("`", "~", "```", "```\n", "``` ", "```p ", "```py\n", "~~~ `", "`~", "``` \t", "~~~\n```\n", "```\nx```"),
    *("<answer>", "</answer>", "<answer", "<", "<answer></answer>", "<answer>\n", "</answer><answer>"),
]
TEXTS = [
    before + unit * (SIZE // len(unit)) + after
    for unit in UNITS
    for before, after in (("", ""), ("```", "!"), ("```python\n", "!"), ("<answer>", "?"))
]
READERS: dict[str, Callable[[str], Any]] = {
    "extract_code": extract_code,
    "extract_answer": extract_answer,
    "causes": lambda text: group_causes([(text, 1)]),
    "console": lambda text: _CONTROL.sub("?", text),
    **{
        f"output by {how}": lambda text, how=how: [  # type: ignore[misc]
            compare(how, 1e-6, wanted, got) for wanted, got in ((text, text), (text, text + "1"))
        ]
        for how in ("lines", "exact", "tokens", "numbers")
    },
}


@pytest.fixture
def limited() -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise AssertionError(f"more than {SECONDS} s for a text of {SIZE} characters")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("reader", slow_but(set(READERS) - {"causes"}, READERS))
@pytest.mark.usefixtures("limited")
def test_no_text_is_slow_to_read(reader: str) -> None:
    for text in TEXTS:
        READERS[reader](text)


OPENING = re.compile(r"(?P<fence>```+|~~~+)[ \t]*(?P<tag>[A-Za-z0-9_+.\-]*)[ \t]*$")
TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@given(st.text(st.sampled_from("``` ~~\tpy.x!"), max_size=16))
def test_an_opening_fence_is_what_the_pattern_says(line: str) -> None:
    found = OPENING.search(line)
    assert _opening(line) == ((found["fence"], found["tag"]) if found else ("", ""))


@given(st.text(st.sampled_from(" \t\nab"), max_size=30))
def test_a_margin_is_what_textwrap_takes_off(code: str) -> None:
    assert _dedent(code) == textwrap.dedent(code)


@given(st.lists(st.sampled_from(["<answer>", "</answer>", "a", " ", "<"]), max_size=10).map("".join))
def test_an_answer_is_what_the_pattern_says(text: str) -> None:
    found = TAGGED.findall(text)
    assert extract_answer(text) == (found[-1] if found else text).strip()
