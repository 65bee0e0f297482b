"""How a judge is given, what it refuses, and its trial before a run."""

from __future__ import annotations

import asyncio
import copy
import json
import pickle
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from mrl.errors import ConfigError, RewardError
from mrl.rewards import resolve_rewards
from mrl.rewards.judge import Judge
from mrl.types import Task
from mrl.workers.reward import RewardWorker
from tests.rewards.judge.server import JudgeServer, error


def test_forms(server: JudgeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rubric.md").write_text("Longer is better.")
    options = server.options(rubric="rubric.md", scale=[0, 5])
    (tmp_path / "mine.yaml").write_text(json.dumps({"judge": options}))
    for spec in ({"judge": options}, "mine.yaml", json.dumps({"judge": options}), Judge(**options)):
        (judge,) = resolve_rewards(spec)
        assert isinstance(judge, Judge)
        assert (judge.rubric, judge.scale, judge.name) == ("Longer is better.", (0.0, 5.0), "judge")
    one, two = resolve_rewards([{"judge": options}, {"judge": options}])
    assert (one.name, two.name) == ("judge", "judge_2")
    assert two.logged[0] == "reward/judge_2/requests"
    recorded = Judge(**options).recorded()
    assert recorded["judge"]["rubric"] == "Longer is better."
    assert resolve_rewards(recorded)[0].recorded() == recorded


@pytest.mark.parametrize(
    "copied", [lambda j: pickle.loads(pickle.dumps(j)), lambda j: cloudpickle.loads(cloudpickle.dumps(j)), copy.copy]
)
def test_it_travels(server: JudgeServer, copied: Any) -> None:
    judge = Judge(**server.options(name="mine", criteria={"a": "x"}))
    judge.open(None)
    there = copied(judge)
    assert (there.name, there.recorded()) == ("mine", judge.recorded())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"modle": "m"}, "did you mean 'model'"),
        ({"base_url": "localhost:8000"}, "is no URL"),
        ({"base_url": "http://localhost:99999/v1"}, "is no URL"),
        ({"base_url": "http://localhost:80a/v1"}, "is no URL"),
        ({"base_url": "http://user:key@host/v1"}, "api_key_env"),
        ({"api_key_env": "sk-abc"}, "name of an environment variable"),
        ({"rubric": "none.md"}, "none.md cannot be read"),
        ({"rubric": " "}, "it is empty"),
        ({"scale": [5, 5]}, "no range"),
        ({"samples": 2}, "temperature"),
        ({"answer": "([0-9]"}, "no regular expression"),
        ({"answer": "[0-9]+"}, "has 0 groups"),
        ({"criteria": {"a b": "x"}}, "no name of letters"),
        ({"criteria": {"a": "x"}, "answer": "number"}, "answer: json"),
        ({"groupwise": "order", "normalize": False}, "no scale"),
        ({"max_cost": 1}, "prompt_price"),
        ({"prompt_price": 1}, "completion_price"),
        ({"params": {"messages": []}}, "set by the judge"),
        ({"groupwise": "best"}, "groupwise"),
    ],
)
def test_options_that_will_not_do(server: JudgeServer, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=r"reward_funcs: judge: ") as caught:
        resolve_rewards({"judge": server.options(**changes)})
    assert said in str(caught.value)


def test_what_is_missing() -> None:
    with pytest.raises(ConfigError, match=r"judge needs model and base_url and rubric, as in {judge: {model"):
        resolve_rewards("judge")
    with pytest.raises(RewardError, match="takes no options"):
        resolve_rewards({"json:loads": {"a": 1}})
    with pytest.raises(RewardError, match="cannot be read"):
        resolve_rewards("nowhere.yaml")
    with pytest.raises(RewardError, match=r"as in {judge"):
        resolve_rewards({"judge": {}, "sandbox": {}})


def test_names_in_the_rubric_are_columns(server: JudgeServer) -> None:
    worker = RewardWorker({"judge": server.options(rubric="{prompt} {completion} {gold} {{free}}")})
    worker.check_columns(["gold"])
    with pytest.raises(
        ConfigError, match=r"rubric: {gold} is neither {prompt}, {completion} nor a dataset column \(x\)"
    ):
        worker.check_columns(["x"])


# --- before a run -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groupwise", [None, "order"])
def test_the_trial_asks_once_and_counts_it(server: JudgeServer, groupwise: Any) -> None:
    judge = Judge(**server.options(groupwise=groupwise, prompt_price=1.0, completion_price=10.0))
    (notice,) = asyncio.run(judge.try_once(Task("t", [{"role": "user", "content": "2+2?"}])))
    assert notice == "judge: a trial of m took 30 + 7 tokens, cost 0.0001."
    assert len(server.bodies) == 1


def test_a_trial_of_an_endpoint_that_is_down_or_odd(server: JudgeServer) -> None:
    server.respond = lambda body, number: error(401, "no such key")
    with pytest.raises(RewardError, match="answered 401: no such key; it was asked for a trial"):
        asyncio.run(Judge(**server.options()).try_once(Task("t", "2+2?")))
    server.reset()
    server.respond = lambda body, number: error(400, "no schemas") if "response_format" in body else "well"
    (notice,) = asyncio.run(Judge(**server.options()).try_once(Task("t", "2+2?")))
    assert "It refuses JSON schemas" in notice
    assert "It gave no verdict: no readable answer in two" in notice
