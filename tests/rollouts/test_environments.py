"""Environments in TRL's form: reset, methods that are tools, reward; and what goes wrong with them."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest

from mrl.data.tasks import rows_to_tasks
from mrl.errors import ConfigError, DataError, EnvError
from mrl.rollouts import TurnLimits
from mrl.rollouts.runner import Runner
from mrl.rollouts.tools.source import ToolSource
from mrl.types import Task
from tests.rollouts.offered import ASK, Counter, Silent, add, attempt, fail, results
from tests.rollouts.scripted import Scripted, call, setup


async def test_an_environment_is_reset_and_its_methods_are_tools() -> None:
    policy = Scripted([call("up", '{"by": 1}'), call("up", '{"by": 2}'), "done"])
    rollout = await attempt(policy, {"goal": 6, "extra": "x"}, environment_factory=Counter)
    assert rollout.messages[0]["content"] == "go Count to 6."
    assert rollout.prompt == [{"role": "user", "content": "go Count to 6."}]
    assert results(rollout) == ["now 1", "now 3"]
    assert rollout.rewards == {"Counter": 0.5}
    assert "_hidden" not in policy.prompts()[0]
    assert "get_reward" not in policy.prompts()[0]


async def test_text_prompts_stay_text() -> None:
    rollout = await attempt(Scripted(["done"]), {"goal": 2}, prompt="go", environment_factory=Counter)
    assert (rollout.prompt, rollout.completion) == ("go Count to 2.", "done")


async def test_reset_gets_every_column() -> None:
    seen = {}

    class Looks(Counter):
        def reset(self, **columns: Any) -> None:
            seen.update(columns)
            super().reset()

    await attempt(Scripted(["done"]), {"goal": 6, "id": 7}, environment_factory=Looks)
    assert seen == {"prompt": ASK, "goal": 6, "id": 7}


async def test_asynchronous_methods() -> None:
    rollout = await attempt(Scripted([call("ask"), "done"]), environment_factory=Silent)
    assert (results(rollout), rollout.rewards, rollout.prompt) == (["yes"], {"Silent": 1.0}, ASK)


async def test_the_column_environment_selects_it() -> None:
    source = ToolSource.create(setup(), tools=[add], environment_factory={"count": Counter, "ask": Silent})
    seen = {}
    for name, other in (("count", "ask"), ("ask", "up")):
        policy = Scripted(["done"])
        rollout = await source.run(Task("t", ASK, {"environment": name}), 0, policy, 1)
        seen[name] = rollout.rewards
        assert f'"name": "{other}"' not in policy.prompts()[0]
        assert '"name": "add"' in policy.prompts()[0]
    assert seen == {"count": {"Counter": 0.0}, "ask": {"Silent": 0.0}}
    with pytest.raises(ConfigError, match="has 'chess', and there is no such environment; it has 'count', 'ask'"):
        source.check_tasks([Task("t", ASK, {"environment": "chess"})])


async def test_instances_are_reused_and_never_shared() -> None:
    class Shared(Counter):
        made = 0

    source = ToolSource.create(setup(), environment_factory=Shared)
    policy = Scripted([call("up", '{"by": 1}'), "done"], seconds=0.02)
    for _ in range(3):
        groups = await Runner(source, policy).run([Task("a", ASK), Task("b", ASK)], 3, seed=0)
        rewards = [rollout.rewards["Shared"] for group in groups for rollout in group.rollouts]
        assert rewards == [1 / 3] * 6
    assert Shared.made == 6


async def test_an_instance_that_broke_is_not_used_again() -> None:
    class Breaks(Counter):
        made = 0

        def reset(self, **_: Any) -> None:
            raise ConnectionError("gone")

    source = ToolSource.create(setup(), environment_factory=Breaks)
    (group,) = await Runner(source, Scripted(["x"])).run([Task("a", ASK)], 2, seed=0)
    assert {rollout.error for rollout in group.rollouts} == {"ConnectionError: gone"}
    assert Breaks.made == 2
    assert await source.close() == []
    assert source.environments.free[None] == []


async def test_a_step_that_hangs_ends_its_own_attempt_with_the_reward_so_far() -> None:
    released = threading.Event()

    class Hangs(Counter):
        made = 0

        def wait(self) -> str:
            """Waits."""
            released.wait(30)
            return "late"

    source = ToolSource.create(setup(TurnLimits(step_seconds=0.2)), environment_factory=Hangs)
    policy = Scripted([call("up", '{"by": 3}'), call("wait")])
    rollout = await source.run(Task("t", ASK), 0, policy, 1)
    assert (rollout.limit, rollout.rewards) == ("step_timeout", {"Hangs": 1.0})
    assert source.environments.free[None] == []  # its instance is still at work
    released.set()


@pytest.mark.parametrize("reward", ["a lot", float("nan"), [1]])
async def test_a_reward_that_is_no_number_is_named(reward: Any) -> None:
    class Pays(Counter):
        def get_reward(self) -> Any:
            return reward

    with pytest.raises(EnvError, match=r"Pays.get_reward \(.*test_environments.py:\d+\) gave .*not a finite number"):
        await attempt(Scripted(["done"]), environment_factory=Pays)


async def test_an_environment_may_own_the_tasks() -> None:
    seen = []

    class Owns(Counter):
        def reset(self, **columns: Any) -> str | None:
            seen.append(columns)
            super().reset()
            return "Count." if columns.get("say", True) else None

    source = ToolSource.create(setup(), environment_factory=Owns)
    tasks = rows_to_tasks([{}, {}, {"say": False}], "rows", need_prompts=False)
    (first, _, silent) = await Runner(source, Scripted(["done"])).run(tasks, 1, seed=0)
    assert first.rollouts[0].messages[0] == {"role": "user", "content": "Count."}
    assert seen[0] == {}
    assert re.search(
        r"Owns.reset \(.*:\d+\) returned None, and task '.*' has no prompt either", silent.rollouts[0].error
    )


@pytest.mark.parametrize("said", [5, {"board": 1}, 2.5])
async def test_a_reset_that_returns_no_text_is_named(said: Any) -> None:
    class Odd(Counter):
        def reset(self, **columns: Any) -> Any:
            return said

    with pytest.raises(EnvError, match=r"Odd.reset \(.*:\d+\) returned .*, of type \w+: it returns text"):
        await attempt(Scripted(["done"]), environment_factory=Odd)


async def test_an_observation_of_10_mb_is_named() -> None:
    class Large(Counter):
        def reset(self, **columns: Any) -> str:
            return "x" * 10_000_000

    with pytest.raises(EnvError, match=r"Large.reset \(.*:\d+\) returned 10,000,000 characters, and max_model_len"):
        await attempt(Scripted(["done"]), environment_factory=Large)


async def test_an_exception_of_10_mb_is_cut() -> None:
    rollout = await attempt(Scripted([call("fail", '{"why": "%s"}' % ("x" * 9000)), "done"]), tools=[fail])
    assert len(results(rollout)[0]) < 4100


async def test_a_factory_that_fails_later_fails_the_attempt_by_name() -> None:
    urls = iter(["one"])

    class Connects(Counter):
        def __init__(self) -> None:
            self.url = next(urls)
            super().__init__()

    source = ToolSource.create(setup(), environment_factory=Connects)
    (group,) = await Runner(source, Scripted(["x"], seconds=0.01)).run([Task("a", ASK)], 2, seed=0)
    assert [rollout.status for rollout in group.rollouts] == ["ok", "failed"]
    assert re.search(r"Connects \(.*:\d+\) could not be made: RuntimeError: StopIteration", group.rollouts[1].error)


async def test_one_object_for_all_is_refused() -> None:
    class Shared(Counter): ...

    shared = Shared()
    source = ToolSource.create(setup(), environment_factory=lambda: shared)
    (group,) = await Runner(source, Scripted(["x"], seconds=0.01)).run([Task("a", ASK)], 2, seed=0)
    assert "gave an object that another attempt has" in group.rollouts[1].error


def test_columns_that_reset_needs_are_looked_for_before_the_run() -> None:
    class Needs(Counter):
        def reset(self, goal: int, level: int) -> None: ...  # type: ignore[override]

    source = ToolSource.create(setup(), environment_factory=Needs)
    source.check_tasks([Task("t", ASK, {"goal": 1, "level": 2, "other": 3})])
    with pytest.raises(DataError, match=r"task 't': .*reset \(.*:\d+\) missing a required argument: 'level' among"):
        source.check_tasks([Task("t", ASK, {"goal": 1})])
