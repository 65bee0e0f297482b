"""What a rewritten test may use: Python's own functions, on plain data, bounded in time and memory.

The test is trusted, the values are not: a program chooses what it returns, so nothing here may take time or memory
that grows faster than the data (which the sandbox bounds). What could goes through a guard.
"""

from __future__ import annotations

import json
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

from mrl.sandbox.grading.compare import Rejected, checked_hashes, is_plain

MAX_ITEMS, MAX_BITS = 1_000_000, 20_000


class Approx:
    """`pytest.approx` for numbers, and for lists, tuples and dicts of them."""

    def __init__(self, expected: Any, rel: float | None = None, abs: float | None = None, nan_ok: bool = False) -> None:
        self.expected, self.rel, self.abs, self.nan_ok = expected, rel, abs, nan_ok

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, got: object) -> bool:
        return self._same(self.expected, got)

    def _same(self, want: Any, got: Any) -> bool:
        if isinstance(want, list | tuple):
            if type(want) is not type(got) or len(want) != len(got):
                return False
            return all(self._same(a, b) for a, b in zip(want, got, strict=True))
        if isinstance(want, dict):
            same_keys = isinstance(got, dict) and want.keys() == got.keys()
            return same_keys and all(self._same(want[key], got[key]) for key in want)
        if not isinstance(want, int | float) or not isinstance(got, int | float):
            return bool(want == got)
        if want == got:
            return True
        if math.isnan(want) or math.isnan(got):
            return self.nan_ok and math.isnan(want) and math.isnan(got)
        if math.isinf(want) or math.isinf(got):
            return False
        absolute = 1e-12 if self.abs is None else self.abs
        relative = self.rel if self.rel is not None else 1e-6 if self.abs is None else 0.0
        return abs(want - got) <= max(absolute, relative * abs(want))


def operate(name: str, left: Any, right: Any) -> Any:
    """A binary operator, by the name of its AST node. Raises Rejected for what would be too large."""
    if name in ("Mult", "Pow", "Mod", "Div", "FloorDiv", "LShift") and not _cheap(name, left, right):
        raise Rejected(f"{name} of these values is too large")
    return OPERATORS[name](left, right)


OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mult": operator.mul,
    "Div": operator.truediv,
    "FloorDiv": operator.floordiv,
    "Mod": operator.mod,
    "Pow": operator.pow,
    "BitAnd": operator.and_,
    "BitOr": operator.or_,
    "BitXor": operator.xor,
    "LShift": operator.lshift,
    "RShift": operator.rshift,
}


def _cheap(name: str, left: Any, right: Any) -> bool:
    if isinstance(left, str | bytes) and name == "Mod":
        return False  # formatting takes widths
    for sequence, times in ((left, right), (right, left)):
        if isinstance(sequence, str | bytes | list | tuple):
            return not isinstance(times, int) or len(sequence) * max(times, 0) <= MAX_ITEMS
    bits = [value.bit_length() if isinstance(value, int) else 64 for value in (left, right)]
    if name in ("Pow", "LShift"):
        if not isinstance(left, int) or not isinstance(right, int):
            return max(bits) <= 1024
        return right < 0 or (right <= MAX_BITS and max(bits[0], 1) * (right if name == "Pow" else 1) <= MAX_BITS)
    return max(bits) <= MAX_BITS


def _set(items: Iterable[Any] = ()) -> set[Any]:
    return set(checked_hashes(items))


def _frozenset(items: Iterable[Any] = ()) -> frozenset[Any]:
    return frozenset(checked_hashes(items))


def _dict(items: Any = (), **more: Any) -> dict[Any, Any]:
    pairs = list(items.items()) if isinstance(items, dict) else [(key, value) for key, value in items]
    checked_hashes(key for key, _ in pairs)
    return {**dict(pairs), **more}


def _counter(items: Iterable[Any] = ()) -> dict[Any, int]:
    """As a plain dict, without the zeros that make no difference to a Counter's equality."""
    if isinstance(items, dict):
        return {key: count for key, count in items.items() if count}
    return dict(Counter(checked_hashes(items)))


def _range(*bounds: int) -> range:
    made = range(*bounds)
    if len(made) > MAX_ITEMS:
        raise Rejected("a range of more than a million")
    return made


def _sum(items: Iterable[Any], /, start: Any = 0) -> Any:
    items = list(items)
    if isinstance(start, list | tuple):  # in linear time, unlike Python's
        parts = [start, *items]
        if any(type(part) is not type(start) for part in parts):
            raise TypeError("sum of different types")
        return type(start)(chain.from_iterable(parts))
    for item in items:
        if not isinstance(item, int | float | complex):
            raise TypeError(f"sum of {type(item).__name__}")
        if isinstance(item, int) and item.bit_length() * len(items) > MAX_BITS * 1000:
            raise Rejected("numbers too large to add up")
    return sum(items, start)


def _round(number: Any, ndigits: int | None = None) -> Any:
    if isinstance(number, int) and number.bit_length() > MAX_BITS:
        raise Rejected("a number too large to round")
    if ndigits is not None and abs(ndigits) > 10_000:
        raise Rejected("too many digits")
    return round(number, ndigits)


def _dumps(value: Any, *, sort_keys: bool = False) -> str:
    return json.dumps(value, sort_keys=sort_keys)


def _loads(text: str) -> Any:
    value = json.loads(text)
    if not is_plain(value):
        raise Rejected("no plain data")
    return value


_OWN: dict[str, Callable[..., Any]] = {
    "set": _set,
    "frozenset": _frozenset,
    "dict": _dict,
    "range": _range,
    "sum": _sum,
    "round": _round,
}
_BUILTINS = (
    *(abs, all, any, bin, bool, chr, complex, enumerate, filter, float, hex, int, isinstance, len, list, map, max),
    *(min, oct, ord, repr, reversed, sorted, str, tuple, type, zip),
)
FUNCTIONS: dict[str, Callable[..., Any]] = {function.__name__: function for function in _BUILTINS} | _OWN
_TYPES = (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, object)
TYPES: dict[str, type] = {kind.__name__: kind for kind in _TYPES}
KEYWORDS = {"key", "reverse", "default", "start", "ndigits", "rel_tol", "abs_tol", "rel", "abs", "nan_ok", "strict"}
_MATH = """
isclose isnan isinf isfinite fabs sqrt floor ceil trunc sin cos tan asin acos atan atan2 sinh cosh tanh exp log log2
log10 pow hypot degrees radians copysign pi e tau inf nan
"""
MODULES: dict[str, dict[str, Any]] = {
    "math": {name: getattr(math, name) for name in _MATH.split()},
    "pytest": {"approx": Approx},
    "collections": {"Counter": _counter},
    "json": {"dumps": _dumps, "loads": _loads},
    "typing": {},
    "unittest": {},
}
_METHODS = """
lower upper strip lstrip rstrip split splitlines startswith endswith count index find title capitalize isdigit isalpha
isalnum isupper islower isspace isnumeric replace keys values items get copy issubset issuperset isdisjoint is_integer
bit_length
"""
METHODS = frozenset(_METHODS.split())
"""Methods of builtin types that take no more time than their data. Their arguments are the test's own literals."""
