"""Values on their way between a program and its judge: plain JSON, read by a side that believes nothing it reads.

Scalars stand for themselves; everything else is an array whose first item says what it is. What can be changed in
place (a list, a dict, a set …) crosses by value under a number, and both sides keep it: every message brings along what
its sender has changed since, so that a test sees what a call did to its arguments. A number is forgotten when nobody
but the table holds the value any more. Only exact types are read by their own methods, so that nothing of a class that
the program made is ever run to send or to receive one.
"""

from __future__ import annotations

import io
import sys
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any

from . import library

Node = Any
SMALL = 1 << 62
SIMPLE = frozenset({type(None), bool, str, float})
NUMBERS = SIMPLE | {int}
UNKNOWN: Any = object()
"""The state of a value whose copy on the other side is not what it is here."""
FILLING: Any = object()
"""The state of a value that is being read. (Putting an object of the program into a set asks for its hash.)"""


class Unreadable(ValueError):
    """What was sent is nothing that this side's counterpart would send."""


class Refused(TypeError):
    """An operation that is not done across the two processes."""


@dataclass(slots=True)
class Shared:
    """A value both sides have a copy of."""

    value: Any
    kind: Kind
    ours: bool
    """Made on this side."""
    seen: Any = None
    """Its state when both were last equal."""


class Side:
    """One end. A subclass says how objects that are no data cross."""

    def __init__(self, first: int) -> None:
        """first: 0 on one side and 1 on the other, so that no number is given twice."""
        self.shared: dict[int, Shared] = {}
        self.numbers: dict[int, int] = {}
        self.forgotten: list[int] = []
        self.next = first

    # --- out

    def encode(self, value: Any) -> Node:
        kind = type(value)
        if kind in SIMPLE:
            return value
        if kind is int:
            return value if -SMALL < value < SMALL else ["i", hex(value)]
        if kind is tuple:
            return ["t", self.encode_items(value)]
        shared = KINDS_BY_TYPE.get(kind)
        if shared is not None:
            return self.share(value, shared)
        data = library.parts(value, kind)
        if data is not None:
            return ["v", data[0], self.encode_items(data[1])]
        return self.encode_object(value)

    def encode_items(self, items: Iterable[Any]) -> list[Node]:
        items = list(items)
        kinds = set(map(type, items))
        if kinds <= SIMPLE or (kinds == {int} and max(items) < SMALL and min(items) > -SMALL):
            return items
        return [self.encode(item) for item in items]

    def share(self, value: Any, kind: Kind) -> Node:
        number = self.numbers.get(id(value))
        if number is not None:
            return ["#", number]
        number, self.next = self.next, self.next + 2
        entry = self.keep(number, value, kind, True)
        entry.seen = FILLING
        node = [kind.tag, number, self.encode_items(kind.read(value)), *map(self.encode, kind.extra(value))]
        entry.seen = kind.state(value)
        return node

    def keep(self, number: int, value: Any, kind: Kind, ours: bool) -> Shared:
        entry = self.shared[number] = Shared(value, kind, ours)
        self.numbers[id(value)] = number
        return entry

    def changes(self) -> list[Node]:
        """What was changed here since it was last sent or received: numbers and contents."""
        out: list[Node] = []
        if not self.shared:
            return out
        for number, entry in list(self.shared.items()):
            if entry.seen is FILLING:
                continue
            state = entry.kind.state(entry.value)
            if entry.seen is UNKNOWN or not entry.kind.same(entry.seen, state):
                entry.seen = state
                out.append([number, self.encode_items(entry.kind.read(entry.value))])
        return out

    def forget_unheld(self) -> list[int]:
        """Numbers of values that only the table holds: to be sent, so that the other side forgets them too."""
        gone: list[int] = []
        if not self.shared:
            return gone
        for number, entry in list(self.shared.items()):
            if sys.getrefcount(entry.value) <= 2:  # the entry's and the call's
                del self.numbers[id(entry.value)], self.shared[number]
                gone.append(number)
            del entry
        return gone

    def forget(self, numbers: Any) -> None:
        for number in numbers:
            entry = self.shared.pop(number, None)
            if entry is not None:
                del self.numbers[id(entry.value)]

    # --- in

    def decode(self, node: Node) -> Any:
        """Raises Unreadable, ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError."""
        if type(node) is not list:
            if type(node) is dict:
                raise Unreadable("an object")
            return node
        tag = node[0]
        if tag == "#":
            return self.shared[node[1]].value
        if tag == "t":
            return tuple(self.decode_items(node[1]))
        kind = KINDS.get(tag)
        if kind is not None:
            return self.decode_shared(kind, node)
        if tag == "i":
            return int(node[1], 16)
        if tag == "v":
            return library.from_parts(node[1], self.decode_items(node[2]))
        return self.decode_object(node)

    def decode_items(self, nodes: Any) -> list[Any]:
        if type(nodes) is not list:
            raise Unreadable("no array")
        kinds = set(map(type, nodes))
        if kinds <= NUMBERS:
            return nodes
        return [self.decode(node) for node in nodes]

    def decode_shared(self, kind: Kind, node: list[Node]) -> Any:
        number = node[1]
        if type(number) is not int or number in self.shared or number % 2 == self.next % 2:
            raise Unreadable("a number that is not free")
        value = kind.make(*map(self.decode, node[3:]))
        entry = self.keep(number, value, kind, False)
        entry.seen = FILLING
        kind.fill(value, self.decode_items(node[2]))
        entry.seen = kind.state(value)
        return value

    def update(self, number: Any, content: Node) -> Shared:
        """The other side changed it."""
        entry = self.shared[number]
        items = self.decode_items(content)
        entry.seen = FILLING
        entry.kind.fill(entry.value, items)
        entry.seen = entry.kind.state(entry.value)
        return entry

    # --- what is no data

    def encode_object(self, value: Any) -> Node:
        raise NotImplementedError

    def decode_object(self, node: list[Node]) -> Any:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Kind:
    """A type that can be changed in place. read: its content as a flat sequence; fill: puts such a content in."""

    tag: str
    type: type
    make: Callable[..., Any]
    read: Callable[[Any], Iterable[Any]]
    fill: Callable[[Any, list[Any]], None]
    state: Callable[[Any], Any]
    """What tells, by `same`, whether it was changed."""
    same: Callable[[Any, Any], bool]
    extra: Callable[[Any], Iterable[Any]] = lambda value: ()
    """Arguments of `make`."""


def _identical(first: Any, second: Any) -> bool:
    return len(first) == len(second) and all(map(is_, first, second))


def _equal(first: Any, second: Any) -> bool:
    return bool(first == second)


def _pairs(value: Any) -> list[Any]:
    return list(chain.from_iterable(dict.items(value)))


def _items(value: Any) -> list[Any]:
    return [*list.__iter__(value)]


def _elements(value: Any) -> list[Any]:
    return [*set.__iter__(value)]


def _queue(value: Any) -> list[Any]:
    return [*deque.__iter__(value)]


def _fill_list(value: Any, items: list[Any]) -> None:
    list.__setitem__(value, slice(None), items)


def _fill_dict(value: Any, items: list[Any]) -> None:
    dict.clear(value)
    for key, item in zip(items[::2], items[1::2], strict=True):
        dict.__setitem__(value, key, item)


def _fill_ordered(value: Any, items: list[Any]) -> None:
    OrderedDict.clear(value)
    for key, item in zip(items[::2], items[1::2], strict=True):
        OrderedDict.__setitem__(value, key, item)


def _fill_set(value: set[Any], items: list[Any]) -> None:
    set.clear(value)
    set.update(value, items)


def _fill_deque(value: deque[Any], items: list[Any]) -> None:
    deque.clear(value)
    deque.extend(value, items)


def _fill_bytes(value: Any, items: list[Any]) -> None:
    value[:] = bytes.fromhex(items[0])


def _fill_array(value: array[Any], items: list[Any]) -> None:
    del value[:]
    value.extend(items)


def _fill_stream(value: Any, items: list[Any]) -> None:
    text, at = items
    value.seek(0)
    value.truncate()
    value.write(text if type(value) is io.StringIO else bytes.fromhex(text))
    value.seek(at)


def _stream(value: Any) -> tuple[Any, int]:
    content = value.getvalue()
    return (content if type(content) is str else content.hex(), value.tell())


def _factory(value: defaultdict[Any, Any]) -> tuple[Any]:
    return (value.default_factory,)


def _members(value: set[Any]) -> dict[int, Any]:
    return {id(member): member for member in set.__iter__(value)}


def _same_members(first: dict[int, Any], second: dict[int, Any]) -> bool:
    return first.keys() == second.keys()


KINDS = {
    kind.tag: kind
    for kind in (
        Kind("l", list, list, _items, _fill_list, _items, _identical),
        Kind("d", dict, dict, _pairs, _fill_dict, _pairs, _identical),
        Kind("s", set, set, _elements, _fill_set, _members, _same_members),
        Kind(
            "q", deque, lambda size: deque(maxlen=size), _queue, _fill_deque, _queue, _identical, lambda q: (q.maxlen,)
        ),
        Kind("D", defaultdict, defaultdict, _pairs, _fill_dict, _pairs, _identical, _factory),
        Kind("C", Counter, Counter, _pairs, _fill_dict, _pairs, _identical),
        Kind("R", OrderedDict, OrderedDict, _pairs, _fill_ordered, _pairs, _identical),
        Kind("b", bytearray, bytearray, lambda b: [b.hex()], _fill_bytes, bytes, _equal),
        Kind("a", array, array, list, _fill_array, bytes, _equal, lambda a: (a.typecode,)),
        Kind("S", io.StringIO, io.StringIO, _stream, _fill_stream, _stream, _equal),
        Kind("B", io.BytesIO, io.BytesIO, _stream, _fill_stream, _stream, _equal),
    )
}
KINDS_BY_TYPE: dict[type, Kind] = {kind.type: kind for kind in KINDS.values()}


def add_numpy() -> None:
    """Arrays are shared too, where the library is loaded."""
    numpy = sys.modules.get("numpy")
    if numpy is None or "n" in KINDS:
        return
    library.add_numpy(numpy)

    def read(value: Any) -> list[Any]:
        return value.ravel().tolist() if value.dtype.hasobject else [numpy.ascontiguousarray(value).tobytes().hex()]

    def fill(value: Any, items: list[Any]) -> None:
        if value.dtype.hasobject:
            for at, item in enumerate(items):
                value.flat[at] = item
        else:
            value[...] = numpy.frombuffer(bytes.fromhex(items[0]), value.dtype).reshape(value.shape)

    def state(value: Any) -> Any:
        return list(map(id, value.ravel())) if value.dtype.hasobject else (value.shape, value.tobytes())

    def make(kind: str, *shape: int) -> Any:
        return numpy.empty(shape, numpy.dtype(kind))

    def extra(value: Any) -> tuple[Any, ...]:
        return (value.dtype.str, *value.shape)

    KINDS["n"] = KINDS_BY_TYPE[numpy.ndarray] = Kind("n", numpy.ndarray, make, read, fill, state, _equal, extra)
    pandas = sys.modules.get("pandas")
    if pandas is not None:
        library.add_pandas(pandas, numpy)
