"""Whole runs with tools and environments: training, held-out evaluation, `mrl eval`, resume and replay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mrl.cli.main import main
from mrl.errors import ConfigError
from mrl.loop.replay import replay
from mrl.store.run import read_rows
from tests import small_runs
from tests.rollouts.calling_model import build_calling_model
from tests.rollouts.counting_tools import Guess, double, guess_call

TASKS = [{"prompt": [{"role": "user", "content": f"round {i}"}], "secret": i % 4} for i in range(6)]
HERE = Path(__file__).parent / "counting_tools.py"


class NoReward:
    def reset(self, **_: Any) -> None: ...


@pytest.fixture(scope="module")
def guesser(tmp_path_factory: pytest.TempPathFactory) -> str:
    says = [guess_call(number) for number in range(4)] + ["<tool_call>\n{"]
    return str(build_calling_model(tmp_path_factory.mktemp("guesser"), says))


def options(**changes: Any) -> dict[str, Any]:
    made = {
        "environment_factory": Guess,
        "train_dataset": TASKS,
        "reward_funcs": None,
        "max_completion_length": 24,
        "max_turns": 4,
        "max_steps": 2,
        "max_model_len": 2048,
    }
    return made | changes


def mrl(*arguments: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert ended.value.code == 0


def rollouts(folder: Path, split: str = "rollouts") -> list[dict[str, Any]]:
    return list(read_rows(folder, split))


def test_an_environment_is_trained_on_and_evaluated(guesser: str, tmp_path: Path) -> None:
    result = small_runs.run(
        guesser, tmp_path / "r", **options(eval_dataset=TASKS, eval_steps=1, weight_sync_method="reload")
    )
    assert result.status == "finished"
    rows = rollouts(tmp_path / "r")
    assert len(rows) == 2 * 2 * 3
    assert any(row["metrics"]["tool_calls"] for row in rows)
    for row in rows:
        (sample,) = row["samples"]
        assert row["status"] == "ok"
        assert row["reward"] == row["rewards"]["Guess"]
        assert sum(sample["mask"]) == row["tokens"] <= 24
        assert row["metrics"]["turns_extended"] == row["metrics"]["turns"] - 1
        said = [m["content"] for m in row["messages"] if m["role"] == "tool"]
        assert len(said) == row["metrics"]["tool_calls"]
        assert ("right" in said) == (row["reward"] == 1.0)
        assert row["limit"] in ("", "max_turns", "max_rollout_tokens")
        assert row["limit"] == "" or sample["finish_reason"] == "length"
    metrics = list(read_rows(tmp_path / "r", "metrics"))
    # Token for token as sampled: trainer and sampler agree on every one of the policy's tokens.
    assert all(row["train/logprob_gap_max"] < 1e-4 for row in metrics)
    for row in metrics:
        mine = [r for r in rows if r["step"] == row["step"]]
        assert row["rollout/turns"] == pytest.approx(sum(r["metrics"]["turns"] for r in mine) / len(mine))
        assert row["reward/Guess/mean"] == pytest.approx(row["reward/mean"])
    evaluated = list(read_rows(tmp_path / "r", "eval_metrics"))
    assert {"eval/Guess/mean", "eval/turns", "eval/tool_calls"} <= set(evaluated[-1])
    assert replay(tmp_path / "r", 2).verdict in ("equal", "rounding")


@pytest.mark.inline("its reward function notes in this process what it sees")
def test_rewards_of_functions_and_of_the_environment_are_added(guesser: str, tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    def short(prompts: list[Any], completions: list[Any], secret: list[int], **_: Any) -> list[float]:
        seen.extend(
            {"prompt": p, "completion": c, "secret": s} for p, c, s in zip(prompts, completions, secret, strict=True)
        )
        return [1 / len(completion) for completion in completions]

    small_runs.run(
        guesser, tmp_path / "r", **options(reward_funcs=short, reward_weights=[2.0], tools=[double], max_steps=1)
    )
    for row in rollouts(tmp_path / "r"):
        assert row["reward"] == pytest.approx(2 * row["rewards"]["short"] + row["rewards"]["Guess"])
        assert list(row["rewards"]) == ["short", "Guess"]
    assert seen[-1]["prompt"][-1]["content"].endswith("Guess a number from 0 to 3.")
    assert seen[-1]["completion"][0]["role"] == "assistant"


@pytest.mark.inline("reward functions see the environments of their own process only")
def test_reward_functions_look_at_environments(guesser: str, tmp_path: Path) -> None:
    """Each at its own rollout's, which serves no other attempt before."""
    seen: list[Guess] = []

    def guesses(completions: list[Any], environments: list[Guess], secret: list[int]) -> list[float]:
        results = [sum(m["role"] == "tool" for m in completion) for completion in completions]
        assert [environment.guesses for environment in environments] == results
        assert [environment.secret for environment in environments] == secret
        seen.extend(environments)
        return [float(environment.guesses) for environment in environments]

    small_runs.run(guesser, tmp_path / "r", **options(reward_funcs=guesses))
    assert all(row["rewards"]["guesses"] == row["metrics"]["tool_calls"] for row in rollouts(tmp_path / "r"))
    assert len({id(environment) for environment in seen}) < len(seen) == 12, "instances are used again"


@pytest.mark.inline("reward functions see the environments of their own process only")
def test_there_are_no_more_environments_than_attempts_at_a_time(guesser: str, tmp_path: Path) -> None:
    """As for a list of servers, each of which takes one connection."""
    servers = iter("abc")

    class Connects(Guess):
        def __init__(self) -> None:
            self.server = next(servers)

    def found(environments: list[Guess], **_: Any) -> list[float]:
        assert len({id(environment) for environment in environments}) == 3
        return [float(environment.found) for environment in environments]

    made = options(environment_factory=Connects, reward_funcs=found, max_concurrent_rollouts=3, max_steps=1)
    assert small_runs.run(guesser, tmp_path / "r", **made).status == "finished"
    assert [row["error"] for row in rollouts(tmp_path / "r") if row["status"] != "ok"] == []


def test_tools_alone_need_a_reward_function(guesser: str, tmp_path: Path) -> None:
    def calls(completions: list[Any], **_: Any) -> list[float]:
        return [float(sum(m["role"] == "tool" for m in completion)) for completion in completions]

    made = options(environment_factory=None, tools=[double], reward_funcs=calls, max_steps=1)
    result = small_runs.run(guesser, tmp_path / "r", **made)
    assert result.status == "finished"
    errors = [m["content"] for row in rollouts(tmp_path / "r") for m in row["messages"] if m["role"] == "tool"]
    assert set(errors) == {"{'error': 'Tool guess not found.'}"}


def test_an_environment_that_makes_its_tasks_needs_no_dataset(guesser: str, tmp_path: Path) -> None:
    made: list[Own] = []

    class Own(Guess):
        closed = False

        def __init__(self) -> None:
            made.append(self)

        def reset(self, **columns: Any) -> str:
            assert columns == {}
            super().reset(secret=2)
            return "Guess a number from 0 to 3."

        def close(self) -> None:
            self.closed = True

    given = options(environment_factory=Own, train_dataset=None, max_steps=1)
    result = small_runs.run(guesser, tmp_path / "r", **given)
    assert result.status == "finished"
    rows = rollouts(tmp_path / "r")
    assert len(rows) == 2 * 3
    assert {row["messages"][0]["content"] for row in rows} == {"Guess a number from 0 to 3."}
    assert made
    assert all(one.closed for one in made), "at the end of the run"


@pytest.mark.parametrize("mode", [pytest.param("pipeline", marks=pytest.mark.slow), "queue"])
def test_environments_in_every_order_of_work(mode: str, guesser: str, tmp_path: Path) -> None:
    result = small_runs.run(guesser, tmp_path / "r", **options(async_mode=mode, weight_sync_method="reload"))
    assert result.status == "finished"
    assert all(row["status"] == "ok" for row in rollouts(tmp_path / "r"))


def test_a_run_is_evaluated_and_resumed_by_its_record(
    guesser: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tools named by their file are in it."""
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("\n".join(map(json.dumps, TASKS)))
    made = options(environment_factory=f"{HERE}:Guess", train_dataset=None, dataset_name=str(tasks), max_steps=1)
    small_runs.run(guesser, tmp_path / "r", **made)
    common = ["--dataset", str(tasks), "--split", "train", "--output", str(tmp_path / "o.jsonl"), "--device", "cpu"]
    mrl("eval", str(tmp_path / "r"), *common, "--json")
    out = capsys.readouterr().out
    assert json.loads(out[out.index("{") :])["tasks"] == 6
    rows = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert all(row["metrics"]["turns"] <= 4 and "Guess" in row["rewards"] for row in rows)
    mrl("train", "--resume", str(tmp_path / "r"), "--max-steps", "2")
    assert small_runs.steps_of(tmp_path / "r") == [1, 2]


def test_a_model_is_evaluated_with_an_environment(guesser: str, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("\n".join(map(json.dumps, TASKS)))
    flags = ["--dataset", str(tasks), "--environment-factory", f"{HERE}:Guess", "--max-turns", "2", "--device", "cpu"]
    mrl("eval", guesser, *flags, "--max-tokens", "8", "--output", str(tmp_path / "o.jsonl"))
    rows = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert len(rows) == 6
    assert {row["limit"] for row in rows} <= {"", "max_turns", "max_tokens", "max_rollout_tokens"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout_source": "echo_game"}, "environment_factory: rollout_source echo_game takes none"),
        ({"environment_factory": None}, "max_turns has an effect only in attempts of several turns"),
        ({"environment_factory": lambda: NoReward()}, "the environment has no get_reward"),
        (
            {"rollout_source": "tools", "environment_factory": None, "reward_funcs": small_runs.distinct},
            "needs tools or environment_factory",
        ),
        (
            {"train_dataset": None, "max_steps": -1},
            "no dataset: where the environment makes its tasks itself, max_steps",
        ),
        (
            {"train_dataset": None, "environment_factory": {"a": Guess}},
            "no dataset: with several environments it needs a column 'environment'",
        ),
        ({"environment_factory": {"a": Guess}}, "the column 'environment' has None"),
    ],
)
def test_options_that_do_not_go_together(changes: dict[str, Any], message: str, guesser: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        small_runs.run(guesser, tmp_path / "r", **options(**changes))
