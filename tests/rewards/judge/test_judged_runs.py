"""Whole runs with rewards from models: what is recorded, resumed, replayed and evaluated, and what an outage does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from mrl import MRLTrainer
from mrl.cli.main import main
from mrl.errors import ConfigError, RewardError, TrainingError
from mrl.loop.replay import replay
from mrl.rewards.judge import Judge
from mrl.store.run import read_rows
from tests import small_runs
from tests.rewards.judge.server import JudgeServer, error, likes_length

KEY = "secret-key-of-the-judge"


def likes_distinct(body: dict[str, Any], number: int) -> str:
    """Rewards that differ within groups of random completions, which are equally long."""
    from tests.rewards.judge.server import texts_shown

    return json.dumps({"reason": "r", "score": len(set("".join(texts_shown(body).values()))) % 11})


def train(model: str, folder: Path, **changes: Any) -> dict[str, float]:
    return small_runs.run(model, folder, **{"max_steps": 2, "reward_trial": False, **changes}).metrics


def bytes_of(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_a_run_records_what_the_judge_took_and_no_key(
    tiny_model: str, server: JudgeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    server.respond = likes_distinct
    prices = {"prompt_price": 1.0, "completion_price": 2.0}
    judge = Judge(**server.options(api_key_env="MY_KEY", **prices))
    folder = tmp_path / "r"
    metrics = train(
        tiny_model, folder, reward_funcs=judge, reward_trial=True, max_steps=1, best_metric="-reward/judge/cost"
    )
    asked = len(server.bodies) - 1  # the trial's
    assert 1 <= asked <= 6
    assert metrics["reward/judge/requests"] == asked
    assert metrics["reward/judge/prompt_tokens"] == 30 * asked
    assert metrics["reward/judge/cost"] == pytest.approx((30 + 2 * 7) * asked / 1e6)
    assert metrics["reward/judge/mean"] == metrics["reward/mean"]
    assert set(server.keys) == {f"Bearer {KEY}"}
    assert KEY.encode() not in bytes_of(folder)
    options = yaml.safe_load((folder / "config.yaml").read_text())["reward"]
    assert options["reward_funcs"]["judge"]["api_key_env"] == "MY_KEY"
    events = [row["message"] for row in read_rows(folder, "events")]
    assert any("a trial of m took 30 + 7 tokens" in message for message in events)
    assert (folder / "judge_cache.db").exists()


def test_an_order_needs_several_attempts_at_held_out_tasks(
    tiny_model: str, server: JudgeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    judge = Judge(**server.options(groupwise="order"))
    with pytest.raises(ConfigError, match="each held-out task is attempted once"):
        train(tiny_model, tmp_path / "r", reward_funcs=judge, eval_dataset=small_runs.TASKS)
    (tmp_path / "judge.yaml").write_text(yaml.safe_dump(judge.recorded()))
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "a"}\n')
    files = ["--dataset", str(tmp_path / "tasks.jsonl"), "--reward-funcs", str(tmp_path / "judge.yaml")]
    with pytest.raises(SystemExit, match="2"):
        main(["eval", tiny_model, *files])
    assert "--num-samples 2 or more" in capsys.readouterr().err
    assert not server.bodies


@pytest.mark.slow
def test_a_resumed_run_needs_no_object_and_asks_nothing_twice(
    tiny_model: str, server: JudgeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.respond = likes_distinct
    judge, whole, part = Judge(**server.options()), tmp_path / "whole", tmp_path / "part"
    train(tiny_model, whole, reward_funcs=[judge], max_steps=3)
    train(tiny_model, part, reward_funcs=[judge], max_steps=2)
    MRLTrainer(resume=str(part), train_dataset=small_runs.TASKS, max_steps=3).train()
    reward = "reward/"
    assert small_runs.record_of(whole, reward)["rollouts"] == small_runs.record_of(part, reward)["rollouts"]
    assert small_runs.same_weights(whole, part)
    asked = len(server.bodies)
    other = {"judge": server.options(rubric="Shorter is better.")}
    with pytest.raises(ConfigError, match="reward_funcs"):
        MRLTrainer(resume=str(part), train_dataset=small_runs.TASKS, max_steps=4, reward_funcs=[other]).train()
    server.respond = lambda body, number: error(500, "gone")
    assert replay(part, 2, "cpu").metrics  # nobody is asked
    assert len(server.bodies) == asked


@pytest.mark.slow
def test_an_outage_stops_the_run_with_its_cause(tiny_model: str, server: JudgeServer, tmp_path: Path) -> None:
    judge = {"judge": server.options(retries=0, cache=str(tmp_path / "c.db"))}

    def respond(body: dict[str, Any], number: int) -> Any:
        return likes_distinct(body, number) if number < 4 else error(503, "overloaded")

    server.respond = respond
    with pytest.raises(TrainingError, match=r"could not be scored .*\n.*judge: http.* answered 503: overloaded"):
        train(tiny_model, tmp_path / "r", reward_funcs=judge)
    rollouts = list(read_rows(tmp_path / "r", "rollouts"))
    failed = [row for row in rollouts if row["reward"] is None]
    assert failed
    assert all("answered 503" in row["error"] for row in failed)
    server.reset()
    server.respond = lambda body, number: error(401, "no such key")
    with pytest.raises(RewardError, match="no such key"):
        train(tiny_model, tmp_path / "s", reward_funcs=judge, reward_trial=True)
    assert not (tmp_path / "s" / "run.db").exists()


@pytest.mark.slow
def test_models_on_workers_elsewhere(
    tiny_model: str, server: JudgeServer, tmp_path: Path, processes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folder and rubric are read where the workers are; objects travel."""
    from transformers import AutoTokenizer

    from tests.rewards.test_classifier import build

    monkeypatch.chdir(tmp_path)
    build(tmp_path / "tiny-rm", AutoTokenizer.from_pretrained(tiny_model))
    (tmp_path / "rubric.md").write_text("More letters are better.")
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"judge": server.options(rubric="rubric.md")}))
    rewards = ["mine.yaml", "tiny-rm", Judge(**server.options(name="second", groupwise="scores"))]
    server.respond = lambda body, number: (
        likes_length(body) if "compare" in body["messages"][0]["content"] else likes_distinct(body, number)
    )
    metrics = train(
        tiny_model, tmp_path / "r", reward_funcs=rewards, backend="processes", num_reward_workers=2, max_steps=1
    )
    assert {"reward/judge/mean", "reward/tiny-rm/mean", "reward/second/mean"} <= set(metrics)
    assert metrics["reward/second/requests"] == 2
    assert metrics["reward/judge/prompt_tokens"] == 30 * metrics["reward/judge/requests"]
    assert metrics["rollout/failed_fraction"] == 0
    assert any("More letters" in body["messages"][1]["content"] for body in server.bodies)


@pytest.mark.slow
def test_simple_mode_and_evaluation(
    tiny_model: str, server: JudgeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.respond = likes_distinct
    judge = {"judge": server.options(prompt_price=1, completion_price=1)}
    metrics = train(tiny_model, tmp_path / "r", reward_funcs=judge, mode="simple", algorithm="grpo", max_steps=1)
    assert metrics["reward/judge/requests"] >= 1
    assert (tmp_path / "r" / "judge_cache.db").exists()
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in small_runs.TASKS))
    asked = len(server.bodies)
    command = ["eval", str(tmp_path / "r"), "--dataset", str(tmp_path / "tasks.jsonl"), "--json", "--device", "cpu"]
    with pytest.raises(SystemExit) as ended:
        main(command)
    said = capsys.readouterr()
    assert not ended.value.code, said.err
    report = json.loads(said.out)
    assert report["logged"]["eval/judge/requests"] == len(server.bodies) - asked
    assert report["logged"]["eval/judge/cost"] > 0


@pytest.mark.slow
def test_held_out_tasks_are_counted_too(tiny_model: str, server: JudgeServer, tmp_path: Path) -> None:
    server.respond = likes_distinct
    judge = {"judge": server.options()}
    options = {"eval_dataset": small_runs.TASKS[:2], "eval_steps": 1, "best_metric": "eval/judge/requests"}
    train(tiny_model, tmp_path / "r", reward_funcs=judge, max_steps=1, **options)
    rows = list(read_rows(tmp_path / "r", "eval_metrics"))
    assert rows[0]["eval/judge/requests"] == 2
