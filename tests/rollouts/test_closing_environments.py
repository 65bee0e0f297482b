"""Environments that are closed: at the end, where they broke, and not when `close` is a tool."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest

from mrl.rollouts.runner import Runner
from mrl.rollouts.tools import environments
from mrl.rollouts.tools.source import ToolSource
from mrl.types import Task
from tests.rollouts.offered import ASK, Counter, results
from tests.rollouts.scripted import Scripted, call, setup


class Closes(Counter):
    """Notes how often it was closed, and on which thread."""

    closed: list[bool]

    def __init__(self) -> None:
        super().__init__()
        self.closed = []
        Closes.instances.append(self)

    def close(self) -> None:
        self.closed.append(threading.get_ident() == self.thread)

    instances: list[Any] = []  # noqa: RUF012


async def test_environments_are_closed_at_the_end_and_where_they_broke() -> None:
    Closes.instances.clear()
    source = ToolSource.create(setup(), environment_factory=Closes)
    policy = Scripted([call("close"), "done"], seconds=0.01)
    (group,) = await Runner(source, policy).run([Task("a", ASK)], 3, seed=0)
    assert results(group.rollouts[0]) == ["{'error': 'Tool close not found.'}"], "it is no tool"
    assert [one.closed for one in Closes.instances] == [[], [], []]
    assert await source.close() == []
    assert [one.closed for one in Closes.instances] == [[True], [True], [True]]
    await source.run(Task("b", ASK), 0, policy, 1)
    assert len(Closes.instances) == 4, "another one is made after that"
    assert await source.close() == []


async def test_environments_that_do_not_close_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Asks(Counter):
        async def close(self) -> None:
            raise ConnectionError("gone already")

    class Hangs(Counter):
        def close(self) -> None:
            released.wait(30)

    released = threading.Event()
    monkeypatch.setattr(environments, "CLOSE_SECONDS", 0.1)
    source = ToolSource.create(setup(), environment_factory={"asks": Asks, "hangs": Hangs})
    problems = sorted(await source.close())
    released.set()
    assert re.search(r"Asks.close \(.*:\d+\) raised ConnectionError: gone already", problems[0])
    assert re.search(r"Hangs.close \(.*:\d+\) took longer than 0.1 s, and was left alone", problems[1])


async def test_close_with_arguments_is_a_tool() -> None:
    class Doors(Counter):
        def close(self, door: str) -> str:
            """
            Closes a door.

            Args:
                door: Which.
            """
            return f"{door} is closed"

    source = ToolSource.create(setup(), environment_factory=Doors)
    rollout = await source.run(Task("t", ASK), 0, Scripted([call("close", '{"door": "A"}'), "done"]), 1)
    assert results(rollout) == ["A is closed"]
    assert await source.close() == []
