"""What tests use of pytest, without pytest, which the judge's process does not have: `raises`, `approx`, `mark`."""

from __future__ import annotations

import math
import re
import types
from collections.abc import Callable
from typing import Any


class Skipped(Exception):
    """A test that does not want to run."""


class _Raised:
    """What `raises` gives: the exception, once it came."""

    value: BaseException

    @property
    def type(self) -> type:
        return type(self.value)

    def match(self, pattern: str) -> bool:
        if not re.search(pattern, str(self.value)):
            raise AssertionError(f"{str(self.value)[:200]!r} does not match {pattern!r}")
        return True


class _Raises:
    def __init__(self, expected: Any, match: str | None) -> None:
        self.expected, self.pattern, self.raised = expected, match, _Raised()

    def __enter__(self) -> _Raised:
        return self.raised

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        if error is None:
            raise AssertionError(f"did not raise {getattr(self.expected, '__name__', self.expected)}")
        if not isinstance(error, self.expected):
            return False
        self.raised.value = error
        if self.pattern is not None:
            self.raised.match(self.pattern)
        return True


def raises(expected: Any, *args: Any, match: str | None = None, **kwargs: Any) -> Any:
    """As pytest's: a context manager, or a call."""
    context = _Raises(expected, match)
    if not args:
        return context
    with context as raised:
        args[0](*args[1:], **kwargs)
    return raised


class approx:  # noqa: N801
    """As pytest's, for numbers, and for sequences, dicts and arrays of them."""

    __hash__ = None  # type: ignore[assignment]
    __array_ufunc__ = None
    __array_priority__ = 100

    def __init__(self, expected: Any, rel: float | None = None, abs: float | None = None, nan_ok: bool = False) -> None:
        self.expected, self.rel, self.abs, self.nan_ok = expected, rel, abs, nan_ok

    def __repr__(self) -> str:
        return f"approx({self.expected!r})"

    def __eq__(self, got: object) -> bool:
        return self._same(self.expected, got)

    def __ne__(self, got: object) -> bool:
        return not self == got

    def _same(self, want: Any, got: Any) -> bool:
        if hasattr(want, "tolist") and hasattr(want, "shape"):
            return getattr(got, "shape", want.shape) == want.shape and self._same(want.tolist(), _listed(got))
        if hasattr(got, "tolist") and hasattr(got, "shape"):
            got = got.tolist()
        if isinstance(want, dict):
            same_keys = isinstance(got, dict) and want.keys() == got.keys()
            return same_keys and all(self._same(want[key], got[key]) for key in want)
        if isinstance(want, list | tuple):
            if not isinstance(got, list | tuple) or type(want) is not type(got) or len(want) != len(got):
                return False
            return all(map(self._same, want, got))
        return self._same_numbers(want, got)

    def _same_numbers(self, want: Any, got: Any) -> bool:
        if want == got:
            return True
        numbers = (int, float, complex)
        if isinstance(want, bool) or not all(isinstance(x, numbers) or hasattr(x, "__float__") for x in (want, got)):
            return False
        if isinstance(want, complex) or isinstance(got, complex):
            return bool(abs(complex(want) - complex(got)) <= self._tolerance(abs(complex(want))))
        first, second = float(want), float(got)
        if math.isnan(first) or math.isnan(second):
            return self.nan_ok and math.isnan(first) and math.isnan(second)
        if math.isinf(first) or math.isinf(second):
            return False
        return abs(first - second) <= self._tolerance(abs(first))

    def _tolerance(self, size: float) -> float:
        absolute = 1e-12 if self.abs is None else self.abs
        relative = self.rel if self.rel is not None else 1e-6 if self.abs is None else 0.0
        return max(absolute, relative * size)


def _listed(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def fail(reason: str = "", pytrace: bool = True) -> None:
    raise AssertionError(reason or "failed")


def skip(reason: str = "", **_: Any) -> None:
    raise Skipped(reason)


def importorskip(name: str, **_: Any) -> Any:
    try:
        return __import__(name)
    except ImportError:
        raise Skipped(name) from None


class _Mark:
    """`pytest.mark`: only what parametrizes a test, or skips it, means something."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def mark(*args: Any, **kwargs: Any) -> Any:
            def decorate(function: Any) -> Any:
                marks = function.__dict__.setdefault("_mrl_marks", [])
                marks.append((name, args, kwargs))
                return function

            if len(args) == 1 and not kwargs and isinstance(args[0], types.FunctionType | type):
                return args[0]
            return decorate

        return mark


def param(*values: Any, **_: Any) -> Any:
    return values


def cases(function: Any) -> list[dict[str, Any]]:
    """The arguments with which a test function is called, by its marks."""
    found: list[dict[str, Any]] = [{}]
    for name, args, kwargs in getattr(function, "_mrl_marks", []):
        if name in ("skip",) or (name == "skipif" and args and args[0]):
            return []
        if name == "parametrize":
            names = args[0] if not isinstance(args[0], str) else [n.strip() for n in args[0].split(",")]
            rows = args[1] if len(args) > 1 else kwargs["argvalues"]
            made = [dict(zip(names, row if len(names) > 1 or _is_row(row) else (row,), strict=True)) for row in rows]
            found = [{**one, **more} for more in made for one in found]
    return found


def _is_row(row: Any) -> bool:
    return False


def module() -> types.ModuleType:
    """It, under its name."""
    made = types.ModuleType("pytest")
    made.__dict__.update(raises=raises, approx=approx, fail=fail, skip=skip, importorskip=importorskip, mark=_Mark(),
                         param=param)  # fmt: skip
    made.__dict__["fixture"] = lambda *a, **k: a[0] if a and callable(a[0]) else (lambda f: f)
    return made
