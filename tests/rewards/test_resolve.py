"""What may stand under `reward_funcs`, and what is said when it does not work."""

import json
import sys

import pytest

from mrl.errors import RewardError
from mrl.rewards import REWARDS, resolve_rewards
from mrl.rewards.code import CodeReward, PartialCodeReward
from mrl.sandbox import Limits

FILE = """
from helper_of_rewards import ONE
import math

def accuracy(completions, **kwargs):
    return [ONE] * len(completions)

async def format_reward(completions): ...

constant = 3
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", ["/nowhere"])
    (tmp_path / "helper_of_rewards.py").write_text("ONE = 1.0\n")
    path = tmp_path / "my_rewards.py"
    path.write_text(FILE)
    return path


def refused(spec) -> str:
    with pytest.raises(RewardError) as caught:
        resolve_rewards(spec)
    return str(caught.value)


def test_names():
    (default,) = resolve_rewards(None, limits=Limits(memory_mb=7), sandbox=lambda: "a sandbox")
    assert type(default) is CodeReward
    assert (default.name, default._limits.memory_mb, default._sandbox) == ("sandbox", 7, "a sandbox")
    both = resolve_rewards(["sandbox", "sandbox_partial", "sandbox"])
    assert [type(r) for r in both] == [CodeReward, PartialCodeReward, CodeReward]
    assert [r.name for r in both] == ["sandbox", "sandbox_partial", "sandbox_2"]
    text = refused("sandbx")
    assert "did you mean 'sandbox'?" in text
    assert "path/to/file.py:function" in text


def test_a_sandbox_is_made_only_for_who_needs_it():
    def make():
        raise AssertionError("not needed")

    resolve_rewards([lambda completions: []], sandbox=make)


def test_registered(monkeypatch):
    monkeypatch.setattr(REWARDS, "_registered", {"mine": lambda completions: [1.0]})
    assert resolve_rewards("mine")[0].name == "lambda"


async def test_file(file):
    rewards = resolve_rewards([f"{file}:accuracy", f"{file}:format_reward", f"{file}:accuracy"])
    assert [r.name for r in rewards] == ["accuracy", "format_reward", "accuracy_2"]
    assert rewards[0].function(["x", "y"]) == [1.0, 1.0]


def test_relative_file(file, monkeypatch):
    monkeypatch.chdir(file.parent)
    assert resolve_rewards("my_rewards.py:accuracy")[0].name == "accuracy"
    assert "did you mean 'my_rewards.py'?" in refused("my_reward.py:accuracy")


def test_file_errors(file):
    text = refused(f"{file.parent}/nothing.py:accuracy")
    assert "no file" in text
    text = refused(f"{file}:acuracy")
    assert "has no function 'acuracy'; did you mean 'accuracy'? (functions there: accuracy, format_reward)" in text
    assert "functions there: accuracy, format_reward" in refused(str(file))
    assert "is a int, not callable" in refused(f"{file}:constant")
    file.write_text("import math\nx = math.sqrt(-1)\n")
    text = refused(f"{file}:accuracy")
    assert "does not import: ValueError: " in text
    assert "(my_rewards.py:2: x = math.sqrt(-1))" in text
    file.write_text("def f(:\n")
    assert "SyntaxError" in refused(f"{file}:f")
    assert "my_rewards.py, line 1" in refused(f"{file}:f")
    file.write_text("import sys\nsys.exit(3)\n")
    assert "SystemExit: 3" in refused(f"{file}:f")
    file.write_text("import no_such_package\n")
    assert "No module named 'no_such_package'" in refused(f"{file}:f")


def test_a_file_is_run_as_it_is_and_leaves_nothing_behind(file, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    for value in "1", "2":  # as long, and most often within the same second
        file.write_text(f"def f(completions, **_): return [{value}] * len(completions)\n")
        (reward,) = resolve_rewards(f"{file}:f")
        assert reward.function(["a"]) == [int(value)]
    assert not list(file.parent.glob("__pycache__"))


def test_module():
    (reward,) = resolve_rewards("json:dumps")
    assert reward.function is json.dumps
    assert "there is no module 'no_such_package'" in refused("no_such_package.x:f")
    assert "there is no module 'json.nothing'" in refused("json.nothing:f")
    assert "json has no function 'dmps'; did you mean 'dumps'?" in refused("json:dmps")


def test_other_things():
    assert "the list is empty" in refused([])
    assert "is a int, not callable" in refused(3)
    assert "is a class without `score`" in refused(dict)
    assert "could not be made" in refused(type("R", (), {"score": 1, "name": "r", "__init__": lambda self, key: None}))
    assert len(refused([lambda: 1, "x" * 500])) < 1000


def test_a_file_is_run_once_until_it_is_edited(file):
    """Two functions of a file share its state, and the checks before a run leave it as the run finds it."""
    file.write_text("calls = []\nimport builtins\nbuiltins.mrl_ran = getattr(builtins, 'mrl_ran', 0) + 1\n" + FILE)
    import builtins

    first, second = resolve_rewards([f"{file}:accuracy", f"{file}:format_reward"])
    (again,) = resolve_rewards(f"{file}:accuracy")
    assert builtins.mrl_ran == 1
    assert first.function.__globals__ is second.function.__globals__ is again.function.__globals__
    file.write_text(file.read_text() + "\nTWO = 2\n")
    resolve_rewards(f"{file}:accuracy")
    assert builtins.mrl_ran == 2
    del builtins.mrl_ran
