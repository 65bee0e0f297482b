"""Instances of classes that the tests define: they live on both sides, as their attributes."""

from __future__ import annotations

import itertools
import operator
from typing import Any

from .values import Kind


def instances(kind: type) -> Kind:
    """How an instance of a class crosses."""

    def same(first: Any, second: Any) -> bool:
        return len(first) == len(second) and all(map(operator.is_, first, second))

    def make() -> Any:
        return object.__new__(kind)

    return Kind("I", kind, make, read_instance, fill_instance, read_instance, same, lambda value: (kind,))


def read_instance(value: Any) -> list[Any]:
    """Attribute names and values, flat."""
    found = dict(getattr(value, "__dict__", {}))
    for base in type(value).__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                found[name] = getattr(value, name)
    return list(itertools.chain.from_iterable(found.items()))


def fill_instance(value: Any, items: list[Any]) -> None:
    wanted = dict(zip(items[::2], items[1::2], strict=True))
    for name in read_instance(value)[::2]:
        if name not in wanted:
            object.__delattr__(value, name)
    for name, item in wanted.items():
        object.__setattr__(value, name, item)
