"""Tools and environments in TRL's form, with a policy that says what it is told to."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from mrl.data.tasks import rows_to_tasks
from mrl.errors import ConfigError, DataError, EnvError
from mrl.rollouts import TurnLimits
from mrl.rollouts.runner import Runner
from mrl.rollouts.tools import environments
from mrl.rollouts.tools.source import ToolSource
from mrl.types import Rollout, Task
from tests.rollouts.scripted import Scripted, call, setup

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


# --- tools ----------------------------------------------------------------------------------------------------------


async def test_a_tool_is_called_and_its_result_is_seen() -> None:
    policy = Scripted([call("add", '{"a": 2, "b": 3}'), lambda prompt: "five" if "\n5\n" in prompt else "what?"])
    rollout = await attempt(policy, tools=[add])
    assert results(rollout) == ["5"]
    assert rollout.messages[-1] == {"role": "assistant", "content": "five"}
    assert [m["role"] for m in rollout.completion] == ["assistant", "tool", "assistant"]
    assert rollout.completion[0]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 2, "b": 3}}
    assert '"name": "add"' in policy.prompts()[0]
    assert "The first." in policy.prompts()[0]
    counts = {name: rollout.metrics[name] for name in ("turns", "turns_extended", "tool_calls", "tool_errors")}
    assert counts == {"turns": 2, "turns_extended": 1, "tool_calls": 1, "tool_errors": 0}
    assert len(rollout.samples) == 1


async def test_several_calls_are_answered_in_their_order() -> None:
    """Asynchronous ones run at the same time, beside the others."""
    calls = [call("later", f'{{"name": "{n}", "seconds": 0.2}}') for n in "abc"]
    calls.insert(1, call("add", '{"a": 1, "b": 1}'))
    start = time.perf_counter()
    rollout = await attempt(Scripted(["\n".join(calls), "done"]), tools=[add, later])
    assert results(rollout) == ["a", "2", "b", "c"]
    assert time.perf_counter() - start < 0.55, "three of 0.2 s, one after the other, take 0.6"
    assert len({m["tool_call_id"] for m in rollout.messages if m["role"] == "tool"}) == 4


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (call("fail", '{"why": "too bad"}'), "{'error': 'too bad'}"),
        (call("nothing"), "{'error': 'Tool nothing not found.'}"),
        (call("add", '{"a": 1}'), "missing 1 required positional argument: 'b'"),
        (call("add", '{"a": 1, "b": 2, "c": 3}'), "unexpected keyword argument 'c'"),
    ],
)
async def test_errors_go_to_the_policy(said: str, told: str) -> None:
    rollout = await attempt(Scripted([said, "sorry"]), tools=[add, fail])
    assert told in results(rollout)[0]
    assert (rollout.status, rollout.metrics["tool_errors"], rollout.metrics["turns"]) == ("ok", 1, 2)


@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError("no"), StopIteration("end")])
async def test_nothing_that_a_tool_raises_ends_the_run(error: BaseException) -> None:
    """Code that the policy wrote may call `exit()`."""

    def run(function: str) -> str:
        """
        Runs.

        Args:
            function: A name that is used inside.
        """
        assert function == "f"
        raise error

    async def runs(self: str) -> str:
        """
        Runs.

        Args:
            self: A name that is used inside.
        """
        assert self == "f"
        raise SystemExit(3)

    said = call("run", '{"function": "f"}') + call("runs", '{"self": "f"}')
    rollout = await attempt(Scripted([said, "sorry"]), tools=[run, runs])
    named = f"{type(error).__name__}: {error}"
    assert results(rollout) == [str({"error": named}), "{'error': '3'}"]


async def test_malformed_calls_are_counted() -> None:
    rollout = await attempt(Scripted(['<tool_call>\n{"name": "add", \n</tool_call>', "?"]), tools=[add])
    assert (rollout.metrics["malformed_calls"], rollout.metrics["tool_calls"]) == (1, 0)
    assert rollout.metrics["turns"] == 1  # there is nothing to answer
    both = '<tool_call>\n{"name"\n</tool_call>\n' + call("add", '{"a": 1, "b": 1}')
    rollout = await attempt(Scripted([both, "two"]), tools=[add])
    assert (rollout.metrics["malformed_calls"], results(rollout)) == (1, ["2"])


async def test_a_tool_that_says_too_much_fails_the_rollout_by_name() -> None:
    def read() -> str:
        """Reads."""
        return "x" * 10_000_000

    source = ToolSource.create(setup(), tools=[read])
    (group,) = await Runner(source, Scripted([call("read")])).run([Task("t", ASK)], 1, seed=0)
    assert group.rollouts[0].status == "failed"
    assert "read (" in group.rollouts[0].error
    assert "test_tools.py:" in group.rollouts[0].error
    assert (
        "returned 10,000,000 characters, and max_model_len leaves room for 320,000 at most" in group.rollouts[0].error
    )


async def test_a_slow_tool_ends_the_attempt() -> None:
    limits = TurnLimits(step_seconds=0.1)
    policy = Scripted([call("add", '{"a": 1, "b": 1}'), call("later", '{"name": "x", "seconds": 30}')])
    rollout = await attempt(policy, limits=limits, tools=[later, add])
    assert (rollout.limit, rollout.metrics["turns"]) == ("step_timeout", 2)


def test_tools_by_name(tmp_path: Path) -> None:
    path = tmp_path / "my_tools.py"
    path.write_text(
        'def shout(text: str) -> str:\n    """Shouts.\n\n    Args:\n        text: What.\n    """\n    return text\n'
    )
    source = ToolSource.create(setup(), tools=f"{path}:shout")
    assert list(source.tools) == ["shout"]


# --- environments ---------------------------------------------------------------------------------------------------


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

    with pytest.raises(EnvError, match=r"Pays.get_reward \(.*test_tools.py:\d+\) gave .*not a finite number"):
        await attempt(Scripted(["done"]), environment_factory=Pays)


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

    with pytest.raises(EnvError, match=r"step_reward of .*Much \(.*test_tools.py:\d+\) is .a lot., not a finite"):
        await attempt(Scripted([call("earn", '{"much": 1}')]), environment_factory=Much)
    with pytest.raises(ConfigError, match=r"step_reward of .*Method .* is a method; it is a number"):
        ToolSource.create(setup(), environment_factory=Method)


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
    assert re.search(r"Asks.close \(.*test_tools.py:\d+\) raised ConnectionError: gone already", problems[0])
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

    with pytest.raises(EnvError, match=r"Odd.reset \(.*test_tools.py:\d+\) returned .*, of type \w+: it returns text"):
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


# --- what can be known before -----------------------------------------------------------------------------------------


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
        ({"tools": [untyped]}, r"tools: untyped \(.*test_tools.py:\d+\) cannot be told to the model"),
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
