"""The same test trains: its rows, its processor, its score."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mrl import MRLTrainer
from mrl.errors import ConfigError
from mrl.store.run import read_rows
from tests.evals import scored_by_tests
from tests.rollouts.calling_model import build_calling_model
from tests.small_runs import options, steps_of

HERE = Path(__file__).parent / "scored_by_tests.py"


def train(model: str, folder: Path, test: Any, **changes: Any) -> list[dict[str, Any]]:
    given = options(model, folder, evaluation_test=test, max_steps=2, **changes)
    for name in ("train_dataset", "reward_funcs"):
        del given[name]
    result = MRLTrainer(**given).train()
    assert result.status == "finished"
    return list(read_rows(folder, "rollouts"))


def test_by_file_and_by_function_it_is_the_same_run(tiny_model: str, tmp_path: Path) -> None:
    named = train(tiny_model, tmp_path / "a", f"{HERE}:distinct")
    given = train(tiny_model, tmp_path / "b", scored_by_tests.distinct)
    assert [one["samples"] for one in named] == [one["samples"] for one in given]
    assert [one["reward"] for one in named] == [one["reward"] for one in given]
    for one in named:
        text = one["messages"][-1]["content"]
        assert one["reward"] == pytest.approx(len(set(text)) / 8)
        assert one["extra"]["evaluation_result"]["metrics"]["length"]["score"] == len(text)
    metrics = list(read_rows(tmp_path / "a", "metrics"))
    lengths = [len(one["messages"][-1]["content"]) for one in named if one["step"] == 1]
    assert metrics[0]["reward/metrics/length"] == pytest.approx(sum(lengths) / len(lengths))
    assert metrics[0]["reward/invalid_scores"] == 0
    assert steps_of(tmp_path / "a") == [1, 2]


def test_groups_are_scored_together(tiny_model: str, tmp_path: Path) -> None:
    rollouts = train(tiny_model, tmp_path / "run", f"{HERE}:ranked")
    groups: dict[Any, list[float]] = {}
    for one in rollouts:
        groups.setdefault((one["step"], one["group"]), []).append(one["reward"])
    assert all(sorted(rewards) == [0.0, 1.0, 2.0] for rewards in groups.values())
    assert all(row["reward/metrics/group"] == 3 for row in read_rows(tmp_path / "run", "metrics"))


def test_a_step_is_scored_together(tiny_model: str, tmp_path: Path) -> None:
    rollouts = train(tiny_model, tmp_path / "run", f"{HERE}:against_the_mean")
    for step in (1, 2):
        assert sum(one["reward"] for one in rollouts if one["step"] == step) == pytest.approx(0.0, abs=1e-6)
    assert all(row["reward/metrics/together"] == 6 for row in read_rows(tmp_path / "run", "metrics"))


def test_scores_that_are_not_valid_are_left_out_and_counted(tiny_model: str, tmp_path: Path) -> None:
    rollouts = train(tiny_model, tmp_path / "run", f"{HERE}:picky", max_failed_fraction=1.0)
    invalid = [one for one in rollouts if one["messages"][0]["content"] == "say 0"]
    assert len(invalid) == 3
    for one in invalid:
        assert (one["reward"], one["status"]) == (None, "failed")
        assert "not valid: it is 0" in one["error"]
    counted = sum(row["reward/invalid_scores"] for row in read_rows(tmp_path / "run", "metrics"))
    assert counted == 3


def test_environments_train_with_the_tests_score(tmp_path: Path) -> None:
    talks = str(build_calling_model(tmp_path / "model", ["left", "right"], strength=20.0))
    rollouts = train(talks, tmp_path / "run", f"{HERE}:played", max_tokens=4, max_completion_length=32)
    ended = [one for one in rollouts if not any(s["finish_reason"] == "length" for s in one["samples"])]
    assert ended
    for one in ended:
        turns = [message["content"] for message in one["messages"] if message["role"] == "assistant"]
        assert len(turns) == 2
        earned = sum(len(text) % 2 == 0 for text in turns)
        assert one["reward"] == pytest.approx(earned / 4 + len(set(turns[-1])) / 100)
        assert one["step_rewards"] == [float(len(text) % 2 == 0) for text in turns]
        assert one["metrics"]["environment_reward"] == earned


def test_held_out_rows_of_the_same_test(tiny_model: str, tmp_path: Path) -> None:
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"messages": [{"role": "user", "content": "other"}]}\n', encoding="utf-8")
    train(tiny_model, tmp_path / "run", f"{HERE}:distinct", eval_dataset=str(held_out))
    evals = list(read_rows(tmp_path / "run", "eval_rollouts"))
    assert {one["messages"][0]["content"] for one in evals} == {"other"}
    assert "eval/metrics/length" in next(iter(read_rows(tmp_path / "run", "eval_metrics")))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"evaluation_test": f"{HERE}:judged"}, "NoOpRolloutProcessor makes rollouts whose tokens nobody sees"),
        ({"evaluation_test": f"{HERE}:against_the_mean", "num_reward_workers": 2}, "mode all"),
        ({"evaluation_test": str(HERE)}, "say which"),
        ({"evaluation_test": f"{HERE}:distinct", "dataset_name": "tiny-code"}, "brings its rows"),
        ({"evaluation_test": f"{HERE}:distinct", "reward_funcs": "sandbox"}, "leave one of"),
        ({"evaluation_test": f"{HERE}:distinct", "tools": ["x.py:f"]}, "says how its rows are attempted"),
        ({"evaluation_test": f"{HERE}:distinct", "eval_split": "test"}, "no splits"),
    ],
)
def test_what_does_not_go_together(tiny_model: str, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    given = options(tiny_model, tmp_path / "run", **changes)
    for name in ("train_dataset", *(["reward_funcs"] if "reward_funcs" not in changes else [])):
        del given[name]
    with pytest.raises(ConfigError, match=message):
        MRLTrainer(**given).train()
