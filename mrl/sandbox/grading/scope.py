"""What the names in the tests mean while they are followed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mrl.sandbox.execution import Call


class NotRewritable(Exception):
    """This test needs the program's own objects, or something that is not evaluated here. Says what."""


@dataclass(frozen=True, slots=True)
class Literal:
    """A name of the test that holds data."""

    value: Any


@dataclass(frozen=True, slots=True)
class Hole:
    """A name of the test that holds the answer of call `index`, or one item of it."""

    index: int
    item: int | None = None


@dataclass(frozen=True, slots=True)
class Path:
    """A name of the test that stands for something of the program: `candidate` for `f`, `s` for `Solution()`."""

    text: str


@dataclass(frozen=True, slots=True)
class Trusted:
    """A module of the test's (`attribute` empty), or one of its functions."""

    module: str
    attribute: str = ""


@dataclass(frozen=True, slots=True)
class Tainted:
    """A name that a test outside this process has changed."""


@dataclass(slots=True)
class Scope:
    """What the names of the tests mean, and the calls found so far."""

    program: frozenset[str]
    """Names that the program binds at its top level."""
    methods: frozenset[str]
    """Methods of its class `Solution`, if it has one."""
    names: dict[str, Any] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    lent: set[str] = field(default_factory=set)
    """Names of lists, dicts and sets handed to a call for its effect on them."""
    shadowed: bool = False
    """Builtin names that the program binds mean the program's: set for asserts that would test nothing otherwise."""
