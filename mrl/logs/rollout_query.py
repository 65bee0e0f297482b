"""The filter, order and place that a link to a list of rollouts holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from mrl.store.filters import Filter, Order
from mrl.store.read import Cursor, Split

PAGE = 50
FIELDS = ("split", "step", "task", "status", "min", "max", "truncated", "version", "text", "order", "up")
"""The names in a link, but for `after` and `before`."""


@dataclass
class RolloutQuery:
    """What was asked for, and what of it could not be understood."""

    where: Filter = field(default_factory=Filter)
    text: str = ""
    order: Order = "step"
    up: bool = False
    """Lowest or oldest first."""
    after: Cursor | None = None
    before: Cursor | None = None
    problems: list[str] = field(default_factory=list)
    given: dict[str, str] = field(default_factory=dict)
    """As it came, without what says nothing."""

    @classmethod
    def of(cls, params: Mapping[str, str], split: Split = "train") -> RolloutQuery:
        """Never raises: what cannot be understood is left out and said. split: where none is named."""
        query = cls(given={name: value for name in FIELDS if (value := params.get(name, "").strip())})
        given, problems = query.given, query.problems
        named: Any = _choice(given, "split", ("train", "eval"), problems)
        status: Any = _choice(given, "status", ("ok", "failed"), problems)
        query.where = Filter(
            split=named or split,
            step=_number(given, "step", int, problems),
            task_id=given.get("task"),
            status=status,
            reward_min=_number(given, "min", float, problems),
            reward_max=_number(given, "max", float, problems),
            truncated={"yes": True, "no": False}.get(_choice(given, "truncated", ("yes", "no"), problems) or ""),
            policy_version=_number(given, "version", int, problems),
        )
        query.text = given.get("text", "")
        order: Any = _choice(given, "order", get_args(Order), problems)
        query.order, query.up = order or "step", given.get("up") == "1"
        query.after, query.before = cursor_of(params, "after", problems), cursor_of(params, "before", problems)
        return query

    @property
    def filters(self) -> int:
        """How many narrow it down."""
        return len([name for name in self.given if name not in ("split", "order", "up")])


def written(cursor: tuple[int, int] | None) -> str | None:
    """A place in a list, for a link."""
    return None if cursor is None else f"{cursor[0]}.{cursor[1]}"


def _choice(given: dict[str, str], name: str, choices: tuple[str, ...], problems: list[str]) -> str | None:
    value = given.get(name)
    if value is None or value in choices:
        return value
    problems.append(f"{name}: {value!r} is none of {', '.join(choices)}")
    del given[name]
    return None


def _number(given: dict[str, str], name: str, kind: Any, problems: list[str]) -> Any:
    value = given.get(name)
    if value is None:
        return None
    try:
        number = kind(value)
        if number != number or abs(number) >= 2**53:
            raise ValueError
        return number
    except (ValueError, OverflowError):
        problems.append(f"{name}: {value!r} is no {'whole ' if kind is int else ''}number; it was left out")
        del given[name]
        return None


def cursor_of(params: Mapping[str, str], name: str, problems: list[str] | None = None) -> Cursor | None:
    """What `written` wrote; None for anything else, which `problems` then says."""
    value = params.get(name, "")
    if not value:
        return None
    parts = value.split(".")
    if len(parts) == 2 and all(map(_is_whole, parts)):
        return Cursor(int(parts[0]), int(parts[1]))
    if problems is not None:
        problems.append(f"{name}: {value!r} is no place in this list; this is its beginning")
    return None


def whole(params: Mapping[str, str], name: str, default: int = 0) -> int:
    """A number from 0 on in a link; `default` for anything else."""
    value = params.get(name, "")
    return int(value) if _is_whole(value) else default


def _is_whole(value: str) -> bool:
    """Digits that Python and SQLite can hold; not those of other scripts, which `int` may not take."""
    return value.isascii() and value.isdigit() and len(value) < 16
