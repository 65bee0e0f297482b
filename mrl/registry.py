"""Registries: named implementations, built in, registered, or from other packages' entry points.

Each open set (losses, engines, sandboxes, sync methods …) is one `Registry`. Built-in members are given as
"module:attribute" strings, so that nothing heavy is imported until it is used. Another package adds a member with
`@registry.register("name")`, or with an entry point in the group `mrl.<set>`, e.g.

    [project.entry-points."mrl.engines"]
    my_engine = "my_package.engine:MyEngine"
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from importlib import metadata
from typing import Any, Generic, TypeVar

from mrl.errors import ConfigError

T = TypeVar("T")

_sets: dict[str, Registry[Any]] = {}
"""The registries of this process, by kind."""
_waiting: dict[str, dict[str, Any]] = {}
"""Members of registries that do not exist yet, by kind."""


def registrations() -> dict[str, dict[str, Any]]:
    """All members registered in this process, by kind and name; backends with workers in other processes `adopt` them
    there."""
    return {kind: dict(members._registered) for kind, members in _sets.items() if members._registered}


def adopt(registered: dict[str, dict[str, Any]]) -> None:
    """Add the members that another process has registered."""
    for kind, members in registered.items():
        there = _sets[kind]._registered if kind in _sets else _waiting.setdefault(kind, {})
        there.update(members)


class Registry(Generic[T]):
    """Members of one open set, by name.

    kind: the entry-point group's last word, e.g. "engines". option: the config field that names a member.
    """

    def __init__(self, kind: str, option: str, builtin: dict[str, str] | None = None) -> None:
        self.kind = kind
        self.option = option
        self._builtin = dict(builtin or {})
        self._registered: dict[str, T] = _waiting.pop(kind, {})
        _sets.setdefault(kind, self)

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that adds a member. Raises ConfigError when the name is taken."""

        def add(member: T) -> T:
            if name in self._builtin or name in self._registered:
                raise ConfigError(f"{self.option}: the name {name!r} is already registered")
            self._registered[name] = member
            return member

        return add

    def names(self) -> list[str]:
        """Every known name, sorted."""
        return sorted({*self._builtin, *self._registered, *self._entry_points()})

    def get(self, name: str) -> T:
        """The member called `name`. Raises ConfigError naming the option and the nearest names."""
        if name in self._registered:
            return self._registered[name]
        if name in self._builtin:
            module, _, attribute = self._builtin[name].partition(":")
            return getattr(importlib.import_module(module), attribute)
        points = self._entry_points()
        if name in points:
            loaded = points[name].load()
            return self._registered.get(name, loaded)  # the loaded module may have registered it by decorator
        close = difflib.get_close_matches(name, self.names(), n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"{self.option}: {name!r} is not available{hint} (known: {', '.join(self.names())})")

    def _entry_points(self) -> dict[str, metadata.EntryPoint]:
        return {point.name: point for point in metadata.entry_points(group=f"mrl.{self.kind}")}
