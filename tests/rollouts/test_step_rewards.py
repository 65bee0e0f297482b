"""Environments that reward each turn."""

from __future__ import annotations

from typing import Any

import pytest

from mrl.errors import ConfigError, EnvError
from mrl.rollouts import TurnLimits
from mrl.rollouts.tools.source import ToolSource
from tests.rollouts.offered import Counter, attempt
from tests.rollouts.scripted import Scripted, call, setup


class Pays:
    """Each call is worth what it says."""

    step_reward = 0.0

    def reset(self) -> None: ...

    def earn(self, much: float) -> str:
        """
        Earns it.

        Args:
            much: How much.
        """
        self.step_reward += much
        if much < 0:
            raise ValueError("a loss")
        return "paid"


async def test_steps_have_rewards_of_their_own() -> None:
    """A turn's calls add up, one that raises too; a call of no tool earns nothing, least of all once more."""
    earn = [call("earn", f'{{"much": {much}}}') for much in (2, 0.5, -1)]
    policy = Scripted([earn[0] + "\n" + earn[1], call("nothing"), earn[2], "done"])
    rollout = await attempt(policy, environment_factory=Pays)
    assert rollout.step_rewards == [2.5, 0.0, -1.0, 0.0]
    assert rollout.rewards == {"environment": 1.5}
    assert ToolSource.scores(environment_factory=Pays)
    assert ToolSource.create(setup(), environment_factory=Pays).gives_rewards()


async def test_an_attempt_that_calls_nothing_has_earned_nothing() -> None:
    """Which is a reward, and not the lack of one."""
    rollout = await attempt(Scripted(["no"]), environment_factory=Pays)
    assert (rollout.step_rewards, rollout.rewards) == ([0.0], {"environment": 0.0})
    cut = await attempt(Scripted(["no"]), environment_factory=Pays, limits=TurnLimits(turn_tokens=1))
    assert (cut.limit, cut.step_rewards, cut.rewards) == ("max_tokens", [], {"environment": 0.0})


async def test_rewards_of_steps_and_of_the_end_are_added() -> None:
    class Both(Counter):
        def reset(self, **_: Any) -> None:  # type: ignore[override]
            super().reset(goal=4)
            self.step_reward = 0.0

        def up(self, by: int) -> str:
            """
            Counts up.

            Args:
                by: How much.
            """
            self.step_reward += by
            return super().up(by)

    policy = Scripted([call("up", '{"by": 1}'), call("up", '{"by": 2}'), "done"])
    rollout = await attempt(policy, environment_factory=Both, limits=TurnLimits(turns=2))
    assert (rollout.step_rewards, rollout.limit) == ([1.0, 2.0], "max_turns")
    assert rollout.rewards == {"environment": 3.0, "Both": 0.75}


async def test_step_rewards_are_numbers() -> None:
    class Much(Pays):
        def earn(self, much: float) -> str:
            """
            Earns it.

            Args:
                much: How much.
            """
            self.step_reward = "a lot"  # type: ignore[assignment]
            return "paid"

    class Method(Pays):
        def step_reward(self) -> float:  # type: ignore[override]
            return 1.0

    with pytest.raises(EnvError, match=r"step_reward of .*Much \(.*:\d+\) is .a lot., not a finite"):
        await attempt(Scripted([call("earn", '{"much": 1}')]), environment_factory=Much)
    with pytest.raises(ConfigError, match=r"step_reward of .*Method .* is a method; it is a number"):
        ToolSource.create(setup(), environment_factory=Method)
