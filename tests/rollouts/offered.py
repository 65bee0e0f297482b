"""Tools and environments of several tests, and attempts with them."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from mrl.rollouts import TurnLimits
from mrl.rollouts.tools.source import ToolSource
from mrl.types import Rollout, Task
from tests.rollouts.scripted import Scripted, setup

ASK = [{"role": "user", "content": "go"}]


def add(a: int, b: int) -> int:
    """
    Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def fail(why: str) -> str:
    """
    Fails.

    Args:
        why: What it says.
    """
    raise ValueError(why)


async def later(name: str, seconds: float) -> str:
    """
    Answers after a while.

    Args:
        name: What it says.
        seconds: How long it takes.
    """
    await asyncio.sleep(seconds)
    return name


class Counter:
    """Counts up to a goal."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        self.thread = threading.get_ident()
        self.resets = 0

    def reset(self, goal: int = 3, **columns: Any) -> str | None:
        self.goal, self.count, self.columns = goal, 0, columns
        self.resets += 1
        return f" Count to {goal}."

    def up(self, by: int) -> str:
        """
        Counts up.

        Args:
            by: How much.
        """
        assert threading.get_ident() == self.thread
        self.count += by
        return f"now {self.count}"

    def _hidden(self) -> None:
        raise AssertionError

    @property
    def broken(self) -> int:
        raise AssertionError

    def get_reward(self) -> float:
        return min(self.count, self.goal) / self.goal


class Silent:
    """Says nothing at first, and answers later."""

    def reset(self) -> None:
        self.asked = 0

    async def ask(self) -> str:
        """Asks."""
        await asyncio.sleep(0.01)
        self.asked += 1
        return "yes"

    async def get_reward(self) -> float:
        return float(self.asked)


async def attempt(policy: Scripted, columns: dict[str, Any] | None = None, limits: TurnLimits | None = None,
                  prompt: Any = ASK, **options: Any) -> Rollout:  # fmt: skip
    source = ToolSource.create(setup(limits), **options)
    return await source.run(Task("t", prompt, columns or {}), 0, policy, 1)


def results(rollout: Rollout) -> list[str]:
    return [m["content"] for m in rollout.messages if m["role"] == "tool"]
