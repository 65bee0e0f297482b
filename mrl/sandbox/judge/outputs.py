"""What a script printed against what it should have."""

from __future__ import annotations

import math
from collections.abc import Callable

NUMBER_LENGTH = 400


def compare(how: str, tolerance: float, wanted: str, got: str) -> str:
    """Why stdout `got` is not as wanted, or "" when it is. how: see `IOTest.compare`."""
    if how == "exact":
        return _exact(wanted, got)
    if how == "lines":
        return _lines(wanted, got)
    if how == "tokens":
        return _by_token(wanted, got, lambda want, have: want == have)
    return _by_token(wanted, got, lambda want, have: want == have or _close(want, have, tolerance))


def _exact(wanted: str, got: str) -> str:
    if got == wanted:
        return ""
    pairs = enumerate(zip(wanted, got, strict=False))
    at = next((k for k, (a, b) in pairs if a != b), min(len(wanted), len(got)))
    want, have = wanted[at : at + 60], got[at : at + 60]
    return f"stdout character {at + 1}: expected {want!r}, got {have!r}"


def _lines(wanted: str, got: str) -> str:
    expected, lines = _normal(wanted), _normal(got)
    if expected == lines:
        return ""
    pairs = enumerate(zip(expected, lines, strict=False))
    line = next((number for number, (a, b) in pairs if a != b), min(len(expected), len(lines)))
    want, have = ("".join(of[line : line + 1])[:200] for of in (expected, lines))
    return f"stdout line {line + 1}: expected {want!r}, got {have!r}"


def _normal(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _by_token(wanted: str, got: str, same: Callable[[str, str], bool]) -> str:
    expected, found = wanted.split(), got.split()
    for number, (want, have) in enumerate(zip(expected, found, strict=False)):
        if not same(want, have):
            return f"stdout token {number + 1}: expected {want[:200]!r}, got {have[:200]!r}"
    if len(expected) != len(found):
        return f"stdout: expected {len(expected)} tokens, got {len(found)}"
    return ""


def _close(want: str, have: str, tolerance: float) -> bool:
    """Both read as numbers, and are equal within the tolerance (relative or absolute, as judges do)."""
    first, second = _number(want), _number(have)
    if first is None or second is None:
        return False
    if isinstance(first, int) and isinstance(second, int):
        return first == second
    try:
        return math.isclose(first, second, rel_tol=tolerance, abs_tol=tolerance)
    except OverflowError:
        return False


def _number(token: str) -> int | float | None:
    if len(token) > NUMBER_LENGTH or "_" in token:
        return None
    for kind in (int, float):
        try:
            return kind(token)
        except ValueError:
            continue
    return None
