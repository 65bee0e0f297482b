"""What shipped environments have in common with each other, and with what a user writes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar, Protocol, TypeVar

from mrl.errors import DataError

T = TypeVar("T")

NOT_TOOLS = ("reset", "get_reward")


class Environment(Protocol):
    """One attempt at a time, as often as `reset` begins another.

    The constructor's arguments are the settings of all attempts, and cost nothing: a browser or a sandbox starts when
    it is needed. The dataset's columns of the same names are settings of one. Everything random comes from the column
    `seed`. Every other public method but `close()` is a tool; class methods are none. A tool raises ValueError for what
    the policy did wrong, and is answered with the message; what failed through no fault of the policy's is raised by
    `get_reward` too, so that the attempt has no reward instead of a bad one.
    """

    fields: ClassVar[dict[str, Any]]
    """Optional: attributes that a server's observations have besides the text, as pydantic's (type, default)."""
    done: bool
    """Nothing that is done changes the reward any more."""

    def reset(self, **columns: Any) -> str:
        """Begin. What it returns is added to the prompt. Raises DataError for columns that do not work."""
        ...

    def get_reward(self) -> float:
        """Of the attempt so far."""
        ...

    @classmethod
    def tasks(cls, count: int, seed: int = 0) -> list[dict[str, Any]]:
        """Rows of a dataset, another attempt each. Those of one seed are the same whatever the count."""
        ...


def rows(instruction: str, count: int, seed: int, **columns: Any) -> list[dict[str, Any]]:
    """Tasks that differ by their seed. Tasks of two seeds have none in common, up to a million of each."""
    prompt = [{"role": "user", "content": instruction}]
    return [{"prompt": prompt, "seed": seed * 1_000_000 + number, **columns} for number in range(count)]


def setting(column: T | None, given: T) -> T:
    """A column's value, where the row has one."""
    return given if column is None else column


def seeded(seed: int | None, or_column: str) -> int:
    """The seed. Raises DataError without one: attempts at one task have to be attempts at the same thing."""
    if seed is None:
        raise DataError(f"the task has no column 'seed'{or_column}: without it each attempt would be at something else")
    return int(seed)


def playing(done: bool) -> None:
    """Raises ValueError when it is over."""
    if done:
        raise ValueError("It is over.")


def tool_methods(environment: Any) -> dict[str, Callable[..., Any]]:
    """The tools of a class, or of an instance, by name: public methods but `reset`, `get_reward` and a `close` that
    ends it. Properties are not evaluated."""
    kind = environment if inspect.isclass(environment) else type(environment)
    names = [name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")]
    hidden = NOT_TOOLS + (("close",) if closes(kind) else ())
    return {name: getattr(environment, name) for name in names if name not in hidden}


def closes(kind: type) -> bool:
    """Whether its instances have a `close()` that needs no arguments, which ends them."""
    close = inspect.getattr_static(kind, "close", None)
    if not callable(getattr(kind, "close", None)):
        return False
    itself = () if isinstance(close, staticmethod | classmethod) else (None,)
    try:
        inspect.signature(kind.close).bind(*itself)  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        return False
    return True
