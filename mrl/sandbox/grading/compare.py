"""Comparison of plain data and of text. Pure; runs where the expected values are, never where the program is.

Values are of exact builtin types when they get here (`is_plain`), so that `==` runs no code of the program and means
what Python's does: `1 == True == 1.0`, `[1] != (1,)`, `nan != nan`, also nested.
"""

from __future__ import annotations

import builtins
import math
import reprlib
from collections.abc import Iterable
from typing import Any

from mrl.sandbox.base import IOTest

SCALARS = frozenset({type(None), bool, int, float, complex, str, bytes})
CONTAINERS = frozenset({list, tuple, set, frozenset})
MAX_COLLISIONS = 64
"""Values of one hash that a set made of a program's data may hold; more is an attack on the comparison's time."""

_short = reprlib.Repr()
_short.maxlevel = 4
_short.maxlist = _short.maxtuple = _short.maxdict = _short.maxset = _short.maxfrozenset = 12
_short.maxstring = _short.maxother = 120
_short.maxlong = 60


class Rejected(Exception):
    """Data that is not compared: it would cost too much, or is not of exact builtin types."""


def is_plain(value: Any) -> bool:
    """Whether `value` is built of exact builtin types only. Does not recurse, so any depth is safe."""
    stack = [value]
    while stack:
        item = stack.pop()
        kind = type(item)
        if kind in SCALARS:
            continue
        if kind is dict:
            stack.extend(item.keys())
            stack.extend(item.values())
        elif kind in CONTAINERS:
            stack.extend(item)
        else:
            return False
    return True


def show(value: Any) -> str:
    """`repr`, cut, for a log line."""
    try:
        return _short.repr(value)[:300]
    except Exception:  # too deep, or an int with more digits than Python prints
        return f"<{type(value).__name__}>"


def checked_hashes(items: Iterable[Any]) -> list[Any]:
    """The items as a list. Raises Rejected when so many share a hash that a set of them would take quadratic time."""
    items = list(items)
    if len(items) <= MAX_COLLISIONS:
        return items
    counts: dict[int, int] = {}
    for item in items:
        value = hash(item)
        counts[value] = counts.get(value, 0) + 1
    if max(counts.values()) <= MAX_COLLISIONS:
        return items
    unique: dict[int, list[Any]] = {}
    for item in items:
        value = hash(item)
        if counts[value] > MAX_COLLISIONS:
            others = unique.setdefault(value, [])
            if item not in others:
                others.append(item)
            if len(others) > MAX_COLLISIONS:
                raise Rejected("too many values share one hash")
    return items


def exception_matches(raised: str, wanted: Iterable[str]) -> bool | None:
    """Whether an exception type called `raised` is caught by `except` of one of `wanted`; None when names do not tell
    (a type of the program's own may or may not derive from a builtin one)."""
    name = raised.rpartition(".")[2]
    actual = _exception(name)
    unknown = False
    for other in (w.rpartition(".")[2] for w in wanted):
        expected = _exception(other)
        if name == other or (actual and expected and issubclass(actual, expected)):
            return True
        if actual is None and expected in (Exception, BaseException):
            return True
        unknown = unknown or actual is None
    return None if unknown else False


def _exception(name: str) -> type[BaseException] | None:
    found = getattr(builtins, name, None)
    return found if isinstance(found, type) and issubclass(found, BaseException) else None


def compare_output(test: IOTest, got: str) -> str:
    """Why stdout `got` is not what `test` expects, or "" when it is."""
    how = {"lines": _lines, "exact": _exact, "tokens": _tokens, "numbers": _numbers}[test.compare]
    return how(test, got)


def _exact(test: IOTest, got: str) -> str:
    if got == test.output:
        return ""
    pairs = enumerate(zip(test.output, got, strict=False))
    at = next((k for k, (a, b) in pairs if a != b), min(len(test.output), len(got)))
    want, have = test.output[at : at + 60], got[at : at + 60]
    return f"stdout character {at + 1}: expected {want!r}, got {have!r}"


def _lines(test: IOTest, got: str) -> str:
    expected, lines = _normal(test.output), _normal(got)
    if expected == lines:
        return ""
    pairs = enumerate(zip(expected, lines, strict=False))
    line = next((number for number, (a, b) in pairs if a != b), min(len(expected), len(lines)))
    want, have = ("".join(of[line : line + 1])[:200] for of in (expected, lines))
    return f"stdout line {line + 1}: expected {want!r}, got {have!r}"


def _tokens(test: IOTest, got: str) -> str:
    return _by_token(test.output.split(), got.split(), lambda want, have: want == have)


def _numbers(test: IOTest, got: str) -> str:
    """Tokens; two that both read as numbers are equal within the tolerance (relative or absolute, as judges do)."""

    def close(want: str, have: str) -> bool:
        if want == have:
            return True
        first, second = _number(want), _number(have)
        if first is None or second is None:
            return False
        if isinstance(first, int) and isinstance(second, int):
            return first == second
        try:
            return math.isclose(first, second, rel_tol=test.tolerance, abs_tol=test.tolerance)
        except OverflowError:
            return False

    return _by_token(test.output.split(), got.split(), close)


def _by_token(expected: list[str], got: list[str], same: Any) -> str:
    for number, (want, have) in enumerate(zip(expected, got, strict=False)):
        if not same(want, have):
            return f"stdout token {number + 1}: expected {want[:200]!r}, got {have[:200]!r}"
    if len(expected) != len(got):
        return f"stdout: expected {len(expected)} tokens, got {len(got)}"
    return ""


def _number(token: str) -> int | float | None:
    if len(token) > 400 or "_" in token:
        return None
    for kind in (int, float):
        try:
            return kind(token)
        except ValueError:
            continue
    return None


def _normal(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
