"""Plain data as type-tagged JSON: what may cross the sandbox's border, in either direction. Never pickle.

Exact builtin types only (`type(x) is ...`), so that nothing of an untrusted class is ever called: no `__iter__`, no
`__eq__`, no `__reduce__` of a subclass. What is not plain crosses as `Opaque`, a type's name. Standard library only:
the same file is loaded inside the sandbox, where `mrl` does not exist.

JSON null, true, false, strings, integers below 2**62, finite floats and arrays stand for None, bool, str, int, float
and list. Everything else is an object with one key: `i` big int (hex), `f` nan or an infinity, `c` complex, `b` bytes
(hex), `t` tuple, `s` set, `z` frozenset, `d` dict (pairs), `o` opaque (type name, reason).
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

MAX_DEPTH = 100
MAX_NODES = 1_000_000
CONTAINER = 4
"""How many values a list, tuple, dict or set counts as, beside what it holds: an empty set takes 216 bytes."""
MAX_BYTES = 4_000_000
"""Of one encoded value."""
SMALL = 1 << 62
COLLISIONS = 64
"""How many keys of one dict or set may share a hash: thousands would take the reader's processor for minutes."""

_NAME = type.__dict__["__name__"].__get__
_AS_DICT = (Counter, OrderedDict, defaultdict)  # equal to a dict of the same items, and read without their own methods


class PlainError(ValueError):
    """Text that is no plain value, or a value that cannot be encoded."""


class Opaque:
    """Stands for a value that is not plain data."""

    __slots__ = ("reason", "type_name")

    def __init__(self, type_name: str, reason: str = "") -> None:
        self.type_name, self.reason = type_name, reason

    def __repr__(self) -> str:
        return f"<{self.type_name}{': ' + self.reason if self.reason else ''}>"


def dumps(value: Any, keep: Callable[[Any], Opaque] | None = None) -> str:
    """ASCII text of any value; what is too deep, too large or not plain at any place is Opaque as a whole.

    keep: called for each object inside that is not plain, to stand for it; then the rest crosses.
    """
    try:
        text = json.dumps(_encode(value, 0, [MAX_NODES], keep), separators=(",", ":"))
        if len(text) <= MAX_BYTES:
            return text
        reason = f"more than {MAX_BYTES} bytes"
    except PlainError as error:
        reason = error.args[0]
    return json.dumps({"o": [type_name(value), reason]})


def loads(text: str | bytes, restore: Callable[[Opaque], Any] | None = None, left: list[int] | None = None) -> Any:
    """The value of `dumps`' text, from a writer nobody trusts. Raises PlainError.

    restore: called for each Opaque inside; what it returns takes its place. left: how many values may be read, in this
    and in later calls; it is counted down.
    """
    if len(text) > MAX_BYTES:
        raise PlainError(f"more than {MAX_BYTES} bytes")
    try:
        return _decode(json.loads(text, parse_constant=_refuse), 0, left or [MAX_NODES], restore)
    except PlainError:
        raise
    except (ValueError, TypeError, RecursionError, OverflowError) as error:
        raise PlainError(f"not plain data: {type(error).__name__}: {str(error)[:200]}") from None


def type_name(value: Any) -> str:
    """The real name of its type, without asking a metaclass; at most 100 characters."""
    return type_name_of(type(value))


def type_name_of(kind: type) -> str:
    """`type_name` of its instances."""
    return str.__getitem__(_NAME(kind), slice(0, 100))


def is_plain(value: Any) -> bool:
    """Whether it crosses as itself."""
    try:
        _encode(value, 0, [MAX_NODES], None)
    except PlainError:
        return False
    return True


def _encode(value: Any, depth: int, left: list[int], keep: Callable[[Any], Opaque] | None) -> Any:
    kind = type(value)
    left[0] -= 1
    if left[0] < 0:
        raise PlainError(f"more than {MAX_NODES} values")
    if value is None or kind is bool:
        return value
    if kind is int:
        return value if -SMALL < value < SMALL else {"i": hex(value)}
    if kind is str:
        if len(value) > MAX_BYTES:
            raise PlainError(f"more than {MAX_BYTES} bytes")
        return value
    if kind is float:
        return value if value - value == 0 else {"f": repr(value)}
    if kind is Opaque:
        return {"o": [value.type_name, value.reason]}
    if depth >= MAX_DEPTH:
        raise PlainError(f"nested deeper than {MAX_DEPTH}")
    depth += 1
    left[0] -= CONTAINER
    if kind is list:
        return [_encode(item, depth, left, keep) for item in value]
    if kind is tuple:
        return {"t": [_encode(item, depth, left, keep) for item in value]}
    if kind is dict or kind in _AS_DICT:
        pairs = dict.items(value)
        return {"d": [[_encode(key, depth, left, keep), _encode(item, depth, left, keep)] for key, item in pairs]}
    if kind is set or kind is frozenset:
        return {"s" if kind is set else "z": [_encode(item, depth, left, keep) for item in value]}
    if kind is bytes:
        return {"b": value.hex()}
    if kind is complex:
        return {"c": [_encode(value.real, depth, left, keep), _encode(value.imag, depth, left, keep)]}
    if keep is not None:
        return _encode(keep(value), depth, left, None)
    raise PlainError(f"holds a {type_name(value)}" if depth > 1 else "")


def _decode(node: Any, depth: int, left: list[int], restore: Callable[[Opaque], Any] | None) -> Any:
    kind = type(node)
    if kind is list:
        return _decode_items(node, depth, left, restore)
    if kind is not dict:
        return node
    if len(node) != 1:
        raise PlainError("an object without exactly one tag")
    ((tag, body),) = node.items()
    if tag in "tszd" and type(body) is not list:
        raise PlainError(f"tag {tag[:20]!r} without an array")
    if tag == "t":
        return tuple(_decode_items(body, depth, left, restore))
    if tag == "d":
        if not all(type(pair) is list for pair in body):
            raise PlainError("tag 'd' without pairs")
        _count(left, CONTAINER - CONTAINER * len(body))  # a pair is a list only on the way
        pairs = [_pair(_decode_items(pair, depth + 1, left, restore)) for pair in body]
        _spread([key for key, _ in pairs])
        return dict(pairs)
    if tag in ("s", "z"):
        items = _spread(_decode_items(body, depth, left, restore))
        return set(items) if tag == "s" else frozenset(items)
    if tag == "i" and type(body) is str:
        return int(body, 16)
    if tag == "f" and body in ("nan", "inf", "-inf"):
        return float(body)
    if tag == "b" and type(body) is str:
        return bytes.fromhex(body)
    if tag == "c" and type(body) is list:
        real, imag = _pair(_decode_items(body, depth, left, restore))
        if type(real) is float and type(imag) is float:
            return complex(real, imag)
    if tag == "o" and type(body) is list:
        name, reason = _pair(body)
        if type(name) is str and type(reason) is str:
            opaque = Opaque(name[:100], reason[:500])
            return opaque if restore is None else restore(opaque)
    raise PlainError(f"unknown tag or body: {tag[:20]!r}")


def _decode_items(items: list[Any], depth: int, left: list[int], restore: Callable[[Opaque], Any] | None) -> list[Any]:
    _count(left, CONTAINER + len(items))
    if depth >= MAX_DEPTH + 2:
        raise PlainError(f"nested deeper than {MAX_DEPTH}")
    return [_decode(item, depth + 1, left, restore) for item in items]


def _count(left: list[int], values: int) -> None:
    left[0] -= values
    if left[0] < 0:
        raise PlainError("more values than are read")


def _pair(items: list[Any]) -> tuple[Any, Any]:
    if len(items) != 2:
        raise PlainError("not a pair")
    return items[0], items[1]


def _spread(keys: list[Any]) -> list[Any]:
    """Refuse keys made to collide. (Hashes that differ but meet in the table part again after a few probes.)"""
    if len(keys) > COLLISIONS:
        counts: dict[int, int] = {}
        for key in keys:
            number = hash(key)
            counts[number] = counts.get(number, 0) + 1
        if max(counts.values()) > COLLISIONS:
            raise PlainError("keys chosen to collide")
    return keys


def _refuse(what: str) -> None:
    raise PlainError(f"not plain data: {what}")
