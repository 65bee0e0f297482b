"""Values and names of libraries, which mean the same in both processes.

A value of one of these types crosses as its parts. A class or a function of a library crosses as its name, and is the
receiver's own: the program can name only what cannot be made to say that two unequal things are equal.
"""

from __future__ import annotations

import builtins
import collections
import datetime
import decimal
import fractions
import importlib
import re
import sys
import types
from collections.abc import Callable
from typing import Any

_LENT = """
abc array base64 bisect calendar cmath collections copy csv dataclasses datetime decimal enum fractions functools
hashlib heapq itertools json math numbers operator pathlib re statistics string struct textwrap time types typing
unicodedata uuid
"""
LENT = frozenset(_LENT.split())
"""Modules in which nothing equals what it is not."""
THIRD_PARTY = {"numpy", "pandas"}
_WITHHELD = """
eval exec compile open input __import__ exit quit breakpoint setattr delattr getattr vars globals locals help memoryview
copyright credits license
"""
WITHHELD = frozenset(_WITHHELD.split())
"""Builtins that a program does not name to its judge."""

Parts = tuple[str, tuple[Any, ...]]
_TO: dict[type, tuple[str, Callable[[Any], tuple[Any, ...]]]] = {}
_FROM: dict[str, Callable[..., Any]] = {}


def value_type(kind: type, to: Callable[[Any], tuple[Any, ...]], back: Callable[..., Any]) -> None:
    """Have values of exactly this type cross as parts."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    _TO[kind] = (name, to)
    _FROM[name] = back


def parts(value: Any, kind: type) -> Parts | None:
    """The name of its type and its parts; None when it is no such value."""
    entry = _TO.get(kind)
    if entry is None and kind.__module__ in _LATER:
        _add_late(kind.__module__)
        entry = _TO.get(kind)
    return None if entry is None else (entry[0], entry[1](value))


def from_parts(name: str, items: list[Any]) -> Any:
    """Raises LookupError, and what making the value raises."""
    if name not in _FROM:
        _add_late(name.rpartition(".")[0])
    return _FROM[name](*items)


_LATER: dict[str, dict[str, Callable[[Any], tuple[Any, ...]]]] = {
    "zoneinfo": {"ZoneInfo": lambda zone: (zone.key,)},
    "uuid": {"UUID": lambda found: (found.hex,)},
    "pathlib": {"PosixPath": lambda path: (str(path),), "PurePosixPath": lambda path: (str(path),)},
}
"""Types of modules that are loaded where they are used: what the fork-server has loaded costs every fork."""


def _add_late(module: str) -> None:
    """Raises LookupError for a module that has none."""
    for name, to in _LATER[module].items():
        kind = getattr(importlib.import_module(module), name)
        value_type(kind, to, kind)


def name_of(value: Any) -> tuple[str, str] | None:
    """Module and name of a class or function that a library has; None when it is none."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if type(value) is types.BuiltinFunctionType and module is None:
        return None  # a bound method
    if type(module) is not str or type(name) is not str or module in ("__main__", None):
        return None
    home = sys.modules.get(module)
    if home is None or vars(home).get(name) is not value:
        return None
    return module, name


def named(module: Any, name: Any) -> Any:
    """What the program named. Raises LookupError for anything but a class, an exception or a builtin function."""
    if type(module) is not str or type(name) is not str or name.startswith("_"):
        raise LookupError("a name that is not lent")
    if module == "builtins" and name not in WITHHELD:
        return getattr(builtins, name)
    root = module.partition(".")[0]
    if root in LENT:
        found = getattr(importlib.import_module(module), name)
    elif root in sys.stdlib_module_names or root in THIRD_PARTY:
        found = getattr(sys.modules[module], name)
        if not (isinstance(found, type) and (root in THIRD_PARTY or issubclass(found, BaseException))):
            raise LookupError("a name that is not lent")
    else:
        raise LookupError("a name that is not lent")
    if not isinstance(found, type):
        raise LookupError("no class")
    return found


def may_name(value: Any) -> tuple[str, str] | None:
    """Module and name under which the program sends it, when the judge will take it for its own."""
    found = name_of(value)
    if found is None:
        return None
    try:
        return found if named(*found) is value else None
    except (LookupError, AttributeError, ImportError):
        return None


# --- types

_UTC = datetime.UTC


for _kind, _to, _back in (
    (complex, lambda c: (c.real, c.imag), complex),
    (bytes, lambda b: (b.hex(),), bytes.fromhex),
    (frozenset, tuple, lambda *items: frozenset(items)),
    (range, lambda r: (r.start, r.stop, r.step), range),
    (slice, lambda s: (s.start, s.stop, s.step), slice),
    (type(...), lambda _: (), lambda: ...),
    (type(NotImplemented), lambda _: (), lambda: NotImplemented),
    (decimal.Decimal, lambda d: (str(d),), decimal.Decimal),
    (fractions.Fraction, lambda f: (f.numerator, f.denominator), fractions.Fraction),
    (datetime.date, lambda d: (d.year, d.month, d.day), datetime.date),
    (
        datetime.datetime,
        lambda d: (d.year, d.month, d.day, d.hour, d.minute, d.second, d.microsecond, d.tzinfo, d.fold),
        lambda *p: datetime.datetime(*p[:8], fold=p[8]),
    ),
    (
        datetime.time,
        lambda t: (t.hour, t.minute, t.second, t.microsecond, t.tzinfo, t.fold),
        lambda *p: datetime.time(*p[:5], fold=p[5]),
    ),
    (datetime.timedelta, lambda d: (d.days, d.seconds, d.microseconds), datetime.timedelta),
    (
        datetime.timezone,
        lambda z: () if z is _UTC else z.__getinitargs__(),
        lambda *p: datetime.timezone(*p) if p else _UTC,
    ),
    (re.Pattern, lambda p: (p.pattern, p.flags & ~re.DEBUG), re.compile),
    (types.SimpleNamespace, lambda n: tuple(x for p in vars(n).items() for x in p), lambda *p: _namespace(p)),
    (types.MappingProxyType, lambda m: (dict(m),), types.MappingProxyType),
    (type({}.keys()), tuple, lambda *keys: dict.fromkeys(keys).keys()),
    (type({}.values()), tuple, lambda *values: dict(enumerate(values)).values()),
    (type({}.items()), tuple, lambda *pairs: dict(pairs).items()),
    (type(collections.OrderedDict().keys()), tuple, lambda *k: collections.OrderedDict.fromkeys(k).keys()),
    (memoryview, lambda m: (m.tobytes(),), memoryview),
):
    value_type(_kind, _to, _back)


def _namespace(pairs: tuple[Any, ...]) -> Any:
    return types.SimpleNamespace(**dict(zip(pairs[::2], pairs[1::2], strict=True)))


def add_numpy(numpy: Any) -> None:
    """Scalars and data types; arrays are in `values`."""
    value_type(numpy.dtype, lambda d: (d.str,), numpy.dtype)
    for kind in set(numpy.sctypeDict.values()):
        if issubclass(kind, numpy.generic) and kind is not numpy.object_ and kind is not numpy.void:

            def back(form: str, data: str) -> Any:
                return numpy.frombuffer(bytes.fromhex(data), numpy.dtype(form))[0]

            value_type(kind, lambda value: (value.dtype.str, value.tobytes().hex()), back)
    for kind in {type(numpy.dtype(name)) for name in numpy.sctypeDict if isinstance(name, str)}:
        if kind is not numpy.dtype:
            value_type(kind, lambda d: (d.str,), numpy.dtype)


def add_pandas(pandas: Any, numpy: Any) -> None:
    """Frames, series and indexes by their columns; time stamps by their nanoseconds."""

    def column(values: Any) -> Any:
        return list(values) if values.dtype == object else numpy.asarray(values)

    def index_parts(index: Any) -> tuple[Any, ...]:
        if type(index) is pandas.RangeIndex:
            return ("range", index.start, index.stop, index.step, index.name)
        return ("index", list(index), str(index.dtype), list(index.names))

    def make_index(kind: str, *more: Any) -> Any:
        if kind == "range":
            return pandas.RangeIndex(*more[:3], name=more[3])
        values, form, names = more
        if values and isinstance(values[0], tuple):
            return pandas.MultiIndex.from_tuples(values, names=names)
        return pandas.Index(values, dtype=form, name=names[0])

    def series_parts(series: Any) -> tuple[Any, ...]:
        return list(series), str(series.dtype), index_parts(series.index), series.name

    def make_series(values: Any, form: str, index: Any, name: Any) -> Any:
        return pandas.Series(values, dtype=form, index=make_index(*index), name=name)

    def frame_parts(frame: Any) -> tuple[Any, ...]:
        columns = [series_parts(frame.iloc[:, at])[:2] for at in range(frame.shape[1])]
        return columns, index_parts(frame.index), index_parts(frame.columns)

    def make_frame(columns: Any, index: Any, names: Any) -> Any:
        rows = make_index(*index)
        made = [pandas.Series(values, dtype=form, index=rows) for values, form in columns]
        frame = pandas.concat(made, axis=1) if made else pandas.DataFrame(index=rows)
        frame.columns = make_index(*names)
        return frame

    value_type(pandas.DataFrame, frame_parts, make_frame)
    value_type(pandas.Series, series_parts, make_series)
    kinds = [pandas.Index, pandas.RangeIndex, pandas.MultiIndex, pandas.DatetimeIndex, pandas.CategoricalIndex]
    for kind in kinds:
        value_type(kind, index_parts, make_index)
    value_type(pandas.Timestamp, lambda t: (t.value, t.tzinfo), lambda v, z: pandas.Timestamp(v, tz=z))
    value_type(pandas.Timedelta, lambda t: (t.value,), pandas.Timedelta)
    value_type(type(pandas.NaT), lambda _: (), lambda: pandas.NaT)
    value_type(type(pandas.NA), lambda _: (), lambda: pandas.NA)
