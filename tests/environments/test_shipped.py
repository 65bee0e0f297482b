"""The environments that need nothing but mrl, and what all of them keep to."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from mrl.cli.main import main
from mrl.environments import ENVIRONMENTS
from mrl.environments.base import tool_methods
from mrl.environments.coding import Coding
from mrl.environments.echo import Echo
from mrl.environments.miniwob import environment
from mrl.environments.number_guessing import NumberGuessing
from mrl.errors import ConfigError, DataError, SandboxError
from mrl.rollouts import TurnLimits
from mrl.rollouts.tools.functions import Tool
from mrl.rollouts.tools.source import ToolSource
from mrl.sandbox import Program, TestResult, Verdict
from mrl.types import Task
from tests.rollouts.scripted import Scripted, call, setup

NAMES = ("coding", "echo", "miniwob", "number_guessing", "textarena")


@pytest.mark.parametrize("name", NAMES)
def test_each_has_the_form_of_an_environment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made at no cost, with tools that can be told to a model; what it needs to be played may be missing here."""
    monkeypatch.setattr("mrl.environments.text_game.find_spec", lambda package: object())
    monkeypatch.setattr(environment, "_pages", Path)
    monkeypatch.setattr(environment, "find_chromium", lambda path: "chromium")
    made = ENVIRONMENTS.get(name)()
    assert made.done is False
    tools = [Tool.of(getattr(made, tool)) for tool in tool_methods(type(made))]
    assert tools
    assert ENVIRONMENTS.names() == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_tasks_are_reproducible_and_others_for_another_seed(name: str) -> None:
    kind = ENVIRONMENTS.get(name)
    first = kind.tasks(5, seed=1)
    assert first == kind.tasks(5, seed=1)
    assert first != kind.tasks(5, seed=2)
    json.dumps(first)
    if name != "coding":
        assert kind.tasks(9, seed=1)[:5] == first


def test_nothing_heavy_is_imported() -> None:
    modules = ["coding", "echo", "number_guessing", "serve", "text_game", "miniwob.environment"]
    code = "".join(f"import mrl.environments.{module}\n" for module in modules)
    code += (
        "import sys; heavy = {'torch', 'transformers', 'openenv', 'textarena', 'playwright', 'selenium', 'miniwob'}\n"
    )
    code += "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- echo -------------------------------------------------------------------------------------------------------------


def test_echo() -> None:
    echo = Echo()
    asked = echo.reset(seed=3)
    phrase = asked.partition(": ")[2]
    assert (echo.echo("something else"), echo.get_reward(), echo.done) == ("something else", 0.0, False)
    assert (echo.echo(phrase), echo.get_reward(), echo.done) == (phrase, 1.0, True)
    with pytest.raises(ValueError, match="over"):
        echo.echo(phrase)
    assert echo.reset(seed=3) == asked != echo.reset(seed=4)
    assert echo.get_reward() == 0.0
    assert echo.reset(phrase="so").endswith(": so")
    with pytest.raises(DataError, match="no column 'seed' and no 'phrase'"):
        echo.reset()


# --- number guessing --------------------------------------------------------------------------------------------------


def test_a_number_is_found() -> None:
    game = NumberGuessing(high=8, guesses=3)
    assert "from 1 to 8. You have 3 guesses" in game.reset(secret=6)
    assert [game.guess(4), game.guess(7)] == ["too small, 2 left", "too large, 1 left"]
    assert not game.done
    assert (game.guess(6), game.get_reward(), game.done) == ("right", 1.0, True)
    game.reset(secret=6, guesses=1)
    assert (game.guess(1), game.done, game.get_reward()) == ("too small, 0 left", True, 0.0)


def test_numbers_follow_from_the_seed() -> None:
    game = NumberGuessing()

    def secret(seed: int) -> int:
        game.reset(seed=seed)
        return game.secret

    drawn = [secret(seed) for seed in range(200)]
    assert drawn == [secret(seed) for seed in range(200)]
    assert len(set(drawn)) > 60
    assert set(drawn) <= set(range(1, 101))


def test_coming_nearer_is_worth_something() -> None:
    """Never less by a further guess, and never as much as finding it."""
    game = NumberGuessing(low=0, high=10, partial=0.5)
    game.reset(secret=8)
    assert game.get_reward() == 0
    rewards = []
    for number in (3, 1, 7, 8):
        game.guess(number)
        rewards.append(game.get_reward())
    assert rewards == pytest.approx([0.25, 0.25, 0.45, 1.0])


@pytest.mark.parametrize(
    "columns",
    [{}, {"secret": 101}, {"seed": 1, "low": 5, "high": 5}, {"seed": 1, "guesses": 0}, {"seed": 1, "partial": 2}],
)
def test_columns_that_do_not_work(columns: dict[str, Any]) -> None:
    with pytest.raises(DataError):
        NumberGuessing().reset(**columns)


# --- coding -----------------------------------------------------------------------------------------------------------

TESTS = ["assert f(1) == 2", "assert f(2) == 4"]


def test_programs_are_tried_and_one_is_handed_in() -> None:
    coding = Coding(slots=1)
    coding.reset(testcases=TESTS)
    assert coding.run_code("print(input() * 2)", stdin="ab") == "abab"
    assert "ZeroDivisionError" in coding.run_code("1 / 0")
    assert coding.run_code("x = 1") == "[nothing printed]"
    assert (coding.get_reward(), coding.done) == (0.0, False)
    assert coding.submit("```python\ndef f(x): return x + 1\n```") == "1 of 2 tests passed."
    assert (coding.get_reward(), coding.done) == (0.5, True)
    with pytest.raises(ValueError, match="over"):
        coding.submit("def f(x): return 2 * x")
    coding.reset(testcases=TESTS, partial=False)
    coding.submit("def f(x): return x + 1")
    assert coding.get_reward() == 0.0
    coding.reset(testcase="\n".join(TESTS))
    coding.submit("def f(x): return 2 * x")
    assert coding.get_reward() == 1.0
    with pytest.raises(DataError, match="no tests"):
        coding.reset()


class Fails:
    """A sandbox that judges nothing, as one does whose machine is gone."""

    name = "fails"

    async def run(self, programs: list[Program]) -> list[Verdict]:
        return [Verdict("sandbox_error", detail="gone") for _ in programs]

    async def close(self) -> None: ...


class Answers(Fails):
    async def run(self, programs: list[Program]) -> list[Verdict]:
        return [Verdict("passed", [TestResult(True)] * len(program.tests)) for program in programs]


@pytest.mark.parametrize("tool", ["run_code", "submit"])
def test_a_sandbox_that_fails_is_a_failed_attempt_and_no_zero(tool: str) -> None:
    source = ToolSource.create(setup(TurnLimits()), environment_factory=lambda: Coding(sandbox=Fails()))
    task = Task("t", [{"role": "user", "content": "code"}], {"testcases": TESTS})
    with pytest.raises(SandboxError, match="gone"):
        asyncio.run(source.run(task, 0, Scripted([call(tool, '{"code": "x"}'), "done"]), 0))


def test_after_a_failure_the_environment_serves_again() -> None:
    coding = Coding(sandbox=Fails())
    coding.reset(testcases=TESTS)
    with pytest.raises(SandboxError):
        coding.submit("x")
    coding._sandbox = Answers()
    coding.reset(testcases=TESTS)
    coding.submit("x")
    assert coding.get_reward() == 1.0


# --- by name ----------------------------------------------------------------------------------------------------------


def test_one_is_used_by_its_name() -> None:
    source = ToolSource.create(setup(TurnLimits(turns=4)), environment_factory={"a": "echo", "b": "number_guessing"})
    assert ToolSource.scores(environment_factory="echo")
    task = Task("t", [{"role": "user", "content": "Play."}], {"environment": "b", "secret": 5, "high": 9})
    policy = Scripted([call("guess", '{"number": 4}'), call("guess", '{"number": 5}'), "done"])
    rollout = asyncio.run(source.run(task, 0, policy, 0))
    assert rollout.rewards == {"NumberGuessing": 1.0}
    assert "Play.\nFind the number from 1 to 9." in policy.prompts()[0]
    with pytest.raises(ConfigError, match="environment_factory: 'ecko' is not available; did you mean 'echo'"):
        ToolSource.create(setup(TurnLimits()), environment_factory="ecko")


@pytest.mark.parametrize("name", ["textarena", "miniwob"])
def test_what_is_not_installed_is_said_before_anything_is_loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(package: str) -> None:
        raise PackageNotFoundError(package)

    monkeypatch.setattr("mrl.environments.text_game.find_spec", lambda package: None)
    monkeypatch.setattr("mrl.environments.miniwob.environment.distribution", missing)
    environment._pages.cache_clear()
    with pytest.raises(ConfigError, match=rf"^environment_factory: {name}: .*pip install 'mrl\[{name}\]'"):
        ToolSource.create(setup(), environment_factory=name)


def test_others_can_be_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ENVIRONMENTS, "_registered", {})
    ENVIRONMENTS.register("mine")(NumberGuessing)
    assert ToolSource.create(setup(TurnLimits()), environment_factory="mine").gives_rewards()


def mrl(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return int(ended.value.code or 0)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert mrl("env", "list") == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == sorted(NAMES)
    assert mrl("env", "tasks", "number_guessing", "--count", "3", "--seed", "7") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows == NumberGuessing.tasks(3, seed=7)
    assert mrl("env", "serve", "number_guessing", "--options", "hihg=4") == 2
    assert "hihg" in capsys.readouterr().err
    assert mrl("env", "tasks", "chess") == 2
