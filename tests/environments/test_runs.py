"""Whole runs with a shipped environment, by its name: training, and the evaluation of what was trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mrl.cli.main import main
from mrl.environments.number_guessing import NumberGuessing
from mrl.store.run import read_rows
from tests import small_runs
from tests.rollouts.calling_model import build_calling_model
from tests.rollouts.counting_tools import guess_call


def test_a_run_names_it_and_is_evaluated_by_its_record(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    model = build_calling_model(tmp_path_factory.mktemp("guesser"), [guess_call(number) for number in range(1, 5)])
    tasks = tmp_path / "tasks.jsonl"
    rows = [row | {"high": 4, "guesses": 2, "partial": 0.5} for row in NumberGuessing.tasks(6)]
    tasks.write_text("\n".join(map(json.dumps, rows)))
    result = small_runs.run(
        str(model),
        tmp_path / "r",
        environment_factory="number_guessing",
        train_dataset=None,
        dataset_name=str(tasks),
        reward_funcs=None,
        max_completion_length=24,
        max_turns=3,
        max_steps=2,
        max_model_len=2048,
    )
    assert result.status == "finished"
    attempts = list(read_rows(tmp_path / "r", "rollouts"))
    assert len(attempts) == 2 * 2 * 3
    for row in attempts:
        said = [message["content"] for message in row["messages"] if message["role"] == "tool"]
        assert row["status"] == "ok"
        assert row["reward"] == row["rewards"]["NumberGuessing"]
        assert (row["reward"] == 1.0) == ("right" in said)
        assert "Find the number from 1 to 4. You have 2 guesses." in row["messages"][0]["content"]
    assert len({row["reward"] for row in attempts}) > 1

    where = ["--dataset", str(tasks), "--split", "train", "--device", "cpu", "--output", str(tmp_path / "o.jsonl")]
    with pytest.raises(SystemExit) as ended:
        main(["eval", str(tmp_path / "r"), *where, "--json"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert json.loads(out[out.index("{") :])["tasks"] == 6
    evaluated = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert all("NumberGuessing" in row["rewards"] for row in evaluated)
