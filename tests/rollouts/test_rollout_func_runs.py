"""Whole runs with rollout functions: in every mode, evaluated, resumed and replayed."""

from __future__ import annotations

import json
import runpy
import socket
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from mrl.cli.main import main
from mrl.errors import ConfigError, RewardError, TrainingError
from mrl.loop.replay import replay
from mrl.store.run import read_rows
from tests import small_runs
from tests.ports import free_port
from tests.rollouts import rollout_functions as functions

HERE = Path(functions.__file__)


def options(**changes: Any) -> dict[str, Any]:
    made = {
        "rollout_func": functions.with_trainer,
        "reward_funcs": functions.reward_from_env,
        "serve": "127.0.0.1:0",
        "max_steps": 2,
    }
    return made | changes


def mrl(*arguments: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert ended.value.code == 0


def rollouts(folder: Path) -> list[dict[str, Any]]:
    return list(read_rows(folder, "rollouts"))


def test_both_forms_make_the_same_run(tiny_model: str, tmp_path: Path) -> None:
    """The older one fetches its completions from the run's own route, with the newest weights."""
    made = options(eval_dataset=small_runs.TASKS[:2], eval_steps=1)
    for name in ("with_trainer", "over_http"):
        small_runs.run(tiny_model, tmp_path / name, **made | {"rollout_func": getattr(functions, name)})
    records = [small_runs.record_of(tmp_path / name) for name in ("with_trainer", "over_http")]
    assert records[0] == records[1]
    rows = rollouts(tmp_path / "over_http")
    assert len(rows) == 2 * 2 * 3
    for row in rows:
        (sample,) = row["samples"]
        assert row["reward"] == row["extra"]["env_reward"] == len(set(row["completion"])) / 8
        assert sample["policy_version"] == row["step"] - 1
    metrics = list(read_rows(tmp_path / "over_http", "metrics"))
    assert all(row["train/logprob_gap_max"] < 1e-4 for row in metrics)
    assert replay(tmp_path / "over_http", 2).verdict in ("equal", "rounding")


@pytest.mark.slow
def test_what_an_environment_says_is_not_trained_on(tiny_model: str, tmp_path: Path) -> None:
    small_runs.run(tiny_model, tmp_path / "r", **options(rollout_func=functions.two_turns, max_completion_length=8))
    for row in rollouts(tmp_path / "r"):
        (sample,) = row["samples"]
        assert row["tokens"] == sum(sample["mask"]) < len(sample["mask"])
    assert all(row["train/logprob_gap_max"] < 1e-4 for row in read_rows(tmp_path / "r", "metrics"))


@pytest.mark.slow
def test_without_logprobs_the_policy_says_them(tiny_model: str, tmp_path: Path) -> None:
    for name in ("with_trainer", "without_logprobs"):
        small_runs.run(tiny_model, tmp_path / name, **options(rollout_func=getattr(functions, name)))
    given, scored = (rollouts(tmp_path / name) for name in ("with_trainer", "without_logprobs"))
    for mine, theirs in zip(given, scored, strict=True):
        assert mine["samples"][0]["completion_ids"] == theirs["samples"][0]["completion_ids"]
        assert mine["samples"][0]["logprobs"] == pytest.approx(theirs["samples"][0]["logprobs"], abs=1e-4)


@pytest.mark.slow
def test_another_temperature_than_the_runs_is_noticed(tiny_model: str, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="max_logprob_gap"):
        small_runs.run(tiny_model, tmp_path / "r", **options(rollout_func=functions.too_cold, max_steps=4))


@pytest.mark.slow
@pytest.mark.parametrize(
    "overlap",
    [
        {"async_mode": "pipeline"},
        {"async_mode": "queue", "max_staleness": 2},
        {"async_mode": "queue", "max_staleness": 2, "in_flight_updates": False},
        {"over_sampling": 1.5},
    ],
    ids=["pipeline", "queue", "drained", "over_sampling"],
)
def test_every_order_of_work(overlap: dict[str, Any], tiny_model: str, tmp_path: Path) -> None:
    made = options(rollout_func=functions.over_http, weight_sync_method="reload", max_steps=4, **overlap)
    assert small_runs.run(tiny_model, tmp_path / "r", **made).status == "finished"
    used = [row for row in rollouts(tmp_path / "r") if row["advantage"] is not None]
    assert len(used) == 4 * 2 * 3
    for row in used:
        (sample,) = row["samples"]
        versions = sample["policy_version"]
        oldest = versions if isinstance(versions, int) else min(versions)
        assert 0 <= oldest <= row["step"] - 1
        assert row["step"] - 1 - oldest <= 2


@pytest.mark.slow
def test_a_run_is_resumed_and_evaluated_by_its_record(
    tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Functions named by their file are in it."""
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("\n".join(map(json.dumps, small_runs.TASKS)))
    made = options(
        rollout_func=f"{HERE}:over_http",
        reward_funcs=f"{HERE}:reward_from_env",
        train_dataset=None,
        dataset_name=str(tasks),
    )
    small_runs.run(tiny_model, tmp_path / "whole", **made | {"max_steps": 3})
    small_runs.run(tiny_model, tmp_path / "r", **made | {"max_steps": 1})
    mrl("train", "--resume", str(tmp_path / "r"), "--max-steps", "3")
    small_runs.check_same_to_rounding(tmp_path / "r", tmp_path / "whole")
    capsys.readouterr()
    common = ["--dataset", str(tasks), "--split", "train", "--device", "cpu", "--output", str(tmp_path / "o.jsonl")]
    mrl("eval", str(tmp_path / "r"), *common, "--json", "--num-samples", "2")
    out = capsys.readouterr().out
    report = json.loads(out[out.index("{") :])
    assert (report["tasks"], report["unscored"]) == (6, 0)
    rows = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert len(rows) == 12
    assert all(row["reward"] == row["extra"]["env_reward"] for row in rows)


@pytest.mark.slow
def test_a_call_that_breaks_off_is_data(tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "calls", 0)
    made = options(rollout_func=functions.fails_every_third, weight_sync_method="reload", max_failed_fraction=0.9)
    result = small_runs.run(tiny_model, tmp_path / "r", **made, async_mode="queue", max_staleness=2)
    assert result.status == "finished"
    failed = [row for row in rollouts(tmp_path / "r") if row["status"] == "failed"]
    assert failed
    assert all("ConnectionError: the game server is gone (rollout_functions.py:" in row["error"] for row in failed)


def test_when_all_break_off_the_run_says_why(tiny_model: str, tmp_path: Path) -> None:
    def broken(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        raise ConnectionError("the game server is gone")

    with pytest.raises(TrainingError, match="the game server is gone") as error:
        small_runs.run(tiny_model, tmp_path / "r", **options(rollout_func=broken))
    assert Path(__file__).name in str(error.value)


def test_a_port_that_is_taken_is_known_before_anything_is_loaded(tiny_model: str, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(ConfigError, match="is taken by another program"):
            small_runs.run(tiny_model, tmp_path / "r", **options(serve=f"127.0.0.1:{other.getsockname()[1]}"))
    assert not (tmp_path / "r" / "config.yaml").exists()


def test_the_policy_is_served_where_another_source_makes_the_rollouts(tiny_model: str, tmp_path: Path) -> None:
    """And not at all without `serve`."""
    from mrl.config import OrchestratorConfig
    from mrl.config.rollout import SERVE_AT

    def at(**given: Any) -> str | None:
        return OrchestratorConfig.from_flat(**given).rollout.serve_at

    assert at() is None
    assert at(serve="127.0.0.1:9000") == "127.0.0.1:9000"
    assert at(rollout_func="x.py:f") == SERVE_AT == "127.0.0.1:8000"
    assert at(rollout_func="x.py:f", serve="off") is None


# --- scripts written for TRL ------------------------------------------------------------------------------------------

SCRIPT = """
import requests
from datasets import Dataset
from envs.echo_env import EchoAction, EchoEnv
from mrl.trl import GRPOConfig, GRPOTrainer

client = EchoEnv.from_docker_image("echo-env:latest")


def rollout_func(prompts, args, processing_class):
    request = {"prompts": prompts, "n": args.num_generations, "temperature": args.temperature}
    request["max_tokens"] = args.max_completion_length
    result = requests.post("http://0.0.0.0:PORT/generate/", json=request).json()
    client.reset()
    texts = processing_class.batch_decode(result["completion_ids"], skip_special_tokens=True)
    result["env_reward"] = [client.step(EchoAction(message=text)).reward for text in texts]
    return result


def reward_from_env(completions, **kwargs):
    rewards = kwargs.get("env_reward", [])
    return [float(reward) for reward in rewards] if rewards else [0.0] * len(completions)


trainer = GRPOTrainer(
    model="Some/Model-0.5B",
    reward_funcs=reward_from_env,
    train_dataset=Dataset.from_dict({"prompt": ["Word to echo:"] * 8}),
    rollout_func=rollout_func,
    args=GRPOConfig(
        vllm_mode="server",
        vllm_server_port=PORT,
        use_vllm=True,
        num_train_epochs=1,
        num_generations=4,
        max_completion_length=2048,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
    ),
)
trainer.train()
"""
"""In the shape of TRL's first documentation of rollout functions, and the trainer from here."""


@pytest.mark.slow
def test_a_script_for_trls_first_rollout_functions_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.conftest import build_model

    class EchoEnv:
        """Stands for the client of a container: it pays for length, as the echo environment does."""

        @classmethod
        def from_docker_image(cls, image: str) -> EchoEnv:
            return cls()

        def reset(self) -> None: ...

        def step(self, action: Any) -> Any:
            return types.SimpleNamespace(reward=len(action.message) / 10)

    echo = types.ModuleType("envs.echo_env")
    echo.EchoEnv, echo.EchoAction = EchoEnv, types.SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "envs", types.ModuleType("envs"))
    monkeypatch.setitem(sys.modules, "envs.echo_env", echo)
    port = free_port()
    monkeypatch.chdir(tmp_path)
    build_model(tmp_path / "Some" / "Model-0.5B", max_position_embeddings=40)
    (tmp_path / "script.py").write_text(SCRIPT.replace("PORT", str(port)))
    with pytest.warns(UserWarning, match=f"the run itself is the server that answers the function, at .*:{port}"):
        trainer = runpy.run_path("script.py")["trainer"].trainer
    rows = rollouts(trainer.run_dir)
    assert len(rows) == 8 * 4
    assert {row["step"] for row in rows} == {1, 2, 3, 4}
    for row in rows:
        assert row["reward"] == len(row["completion"]) / 10
        assert row["samples"][0]["policy_version"] == row["step"] - 1
        assert len(row["samples"][0]["prompt_ids"]) == len("Word to echo:")
    config = trainer.config
    assert (config.training.learning_rate, config.training.batch_size, config.algorithm.beta) == (1e-6, 2, 0.0)


def test_columns_that_only_the_function_gives_are_no_reason_to_refuse_a_reward(tiny_model: str, tmp_path: Path) -> None:
    def reward(completions: list[str], env_reward: list[float]) -> list[float]:
        return env_reward

    assert small_runs.run(tiny_model, tmp_path / "r", **options(reward_funcs=reward, max_steps=1)).status == "finished"
    with pytest.raises(RewardError, match="env_reward"):
        small_runs.run(tiny_model, tmp_path / "s", **options(reward_funcs=reward, rollout_func=None, serve=None))
