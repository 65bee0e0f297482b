"""What is refused before a run, naming what and where."""

from __future__ import annotations

from typing import Any

import pytest

from mrl.errors import ConfigError
from mrl.rollouts.tools.source import ToolSource
from tests.rollouts.offered import Counter, add
from tests.rollouts.scripted import setup


def untyped(a) -> int:  # type: ignore[no-untyped-def]
    """
    Untyped.

    Args:
        a: It.
    """
    return 1


def undocumented(a: int) -> int:
    return 1


class NoReset:
    def up(self) -> str:
        """Up."""
        return ""


class NoTypes(Counter):
    def down(self, by):  # type: ignore[no-untyped-def]
        """
        Down.

        Args:
            by: It.
        """


def several(*numbers: int) -> int:
    """
    Adds them.

    Args:
        numbers: Which.
    """
    return sum(numbers)


class Praises(Counter):
    def get_reward(self) -> str:  # type: ignore[override]
        return "well done"


class Scores(Counter):
    def reset(self, **columns: Any) -> int:  # type: ignore[override]
        return 3


class Raises(Counter):
    def __init__(self) -> None:
        raise OSError("no server")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tools": [untyped]}, r"tools: untyped \(.*test_refused_tools.py:\d+\) cannot be told to the model"),
        ({"tools": [undocumented]}, r"tools: undocumented \(.*:\d+\) cannot be told to the model"),
        ({"tools": [3]}, r"tools: 3 is no function, but of type int"),
        ({"tools": [add, add]}, r"two tools are called 'add'"),
        ({"tools": ["no.py:x"]}, r"'no.py:x' does not import: FileNotFoundError"),
        ({"tools": ["nonsense"]}, r"'nonsense' is not of the form"),
        ({"tools": [several]}, r"several \(.*:\d+\) takes \*numbers: a call names its arguments"),
        ({"environment_factory": Praises}, r"Praises.get_reward \(.*:\d+\) says that it returns str: .* a number"),
        ({"environment_factory": Scores}, r"Scores.reset \(.*:\d+\) says that it returns int: it has to be text"),
        ({"environment_factory": NoReset}, r"NoReset \(.*:\d+\) has no method `reset`"),
        ({"environment_factory": NoTypes}, r"NoTypes.down \(.*:\d+\) cannot be told to the model"),
        ({"environment_factory": {"x": Raises}}, r"environment_factory, 'x': Raises .* no server"),
        ({"environment_factory": {"x": 3}}, r"3 cannot be called"),
    ],
)
def test_bad_tools_are_named_before_the_run(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ToolSource.create(setup(), **options)


def test_a_template_without_calls_is_refused() -> None:
    with pytest.raises(ConfigError, match="chat template writes no calls of tools"):
        ToolSource.create(setup(style="gemma"), tools=[add])


def test_whether_a_reward_function_is_needed() -> None:
    assert ToolSource.scores(environment_factory=Counter)
    assert not ToolSource.scores(tools=[add])
    assert not ToolSource.scores(environment_factory={"a": Counter, "b": NoReset})
