"""Actions on pages are read, and nothing is executed."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.environments.miniwob import actions
from mrl.environments.miniwob.actions import ACTIONS, parse


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("click('12')", ("click", ("12",), {})),
        (" click(12) ", ("click", (12,), {})),
        ("click('3', button='right')", ("click", ("3",), {"button": "right"})),
        ('fill("5", "some \\"text\\"")', ("fill", ("5", 'some "text"'), {})),
        ("select_option('7', ['a', 'b'])", ("select_option", ("7", ["a", "b"]), {})),
        ("scroll(0, -20.5)", ("scroll", (0, -20.5), {})),
        ("noop()", ("noop", (), {})),
    ],
)
async def test_what_is_read(text: str, expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    done = []
    original = ACTIONS[expected[0]]

    async def noted(page: Any, *args: Any, **kwargs: Any) -> None:
        done.append((expected[0], args, kwargs))

    noted.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    monkeypatch.setitem(ACTIONS, expected[0], noted)
    await parse(text)(None)  # type: ignore[arg-type]
    assert done == [expected]


@pytest.mark.parametrize(
    "text",
    [
        *("", "click", "click(", "click()", "click('1', 2, 3, 4)", "clack('1')", "click('1'); click('2')"),
        *(
            "__import__('os').system('true')",
            "click(__import__('os'))",
            "click(x)",
            "click(*['1'])",
            "click(**{'bid': 1})",
        ),
        *("click(['1'])", "fill('1', 5)", "noop(wait_ms='1')", "click(bid='1', page=2)", "(lambda: 1)()"),
        *("a.click('1')", "click('1') if True else 0", "(" * 5000, "click('" + "1" * 20_000 + "')", "\0"),
    ],
)
def test_what_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse(text)


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet="clickfil('1\", )[]{}*=.:0\\\n", max_size=40))
def test_any_text_is_an_action_or_refused(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert callable(parse(text))


@pytest.mark.parametrize("bid", ["1'] , body", "", "a1", "-1", "²", '"]'])
async def test_only_numbers_name_elements(bid: str) -> None:
    with pytest.raises(ValueError, match="not a number"):
        await actions._element(None, bid)  # type: ignore[arg-type]
