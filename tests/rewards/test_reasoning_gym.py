"""reasoning-gym's tasks and verifiers: the same tasks for the same seed, the same scores as the library's own."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mrl import MRLTrainer
from mrl.config import OrchestratorConfig
from mrl.data import load_tasks
from mrl.errors import DataError, RewardError
from mrl.rewards import resolve_rewards
from mrl.rewards.base import RewardRequest, Scores
from mrl.rewards.reasoning_gym import ReasoningGymReward, extract_answer
from mrl.store.run import read_rows
from mrl.types import Task

library = pytest.importorskip("reasoning_gym")


@pytest.fixture(scope="module")
def reward() -> Iterator[ReasoningGymReward]:
    (made,) = resolve_rewards("reasoning_gym")
    assert isinstance(made, ReasoningGymReward)
    yield made
    made.close()


def score(reward: Any, pairs: list[tuple[Task, str]]) -> Scores:
    requests = [RewardRequest(task.id, task.prompt, text, [], task.columns) for task, text in pairs]
    return asyncio.run(reward.score(requests, trainer_state=None))


def test_the_same_seed_gives_the_same_tasks_whatever_else_is_drawn() -> None:
    def draw(**options: Any) -> list[Task]:
        random.random()
        return load_tasks(
            "reasoning_gym:chain_sum?min_terms=2&max_terms=3", **({"max_samples": 6, "seed": 3} | options)
        )

    tasks = draw()
    assert tasks == draw()
    assert len({task.id for task in tasks}) == len(tasks) == 6
    assert all("=" in task.prompt and task.columns["answer"] for task in tasks)
    assert [task.prompt for task in draw(seed=4)] != [task.prompt for task in tasks]
    assert not {task.prompt for task in draw(split="test")} & {task.prompt for task in tasks}
    assert [task.prompt for task in draw(split="test")] == [task.prompt for task in draw(split="test")]


def test_tasks_that_draw_from_the_global_generator_are_the_same_too() -> None:
    first, second = (load_tasks("reasoning_gym:list_functions", max_samples=3, seed=1) for _ in range(2))
    assert first == second
    state = random.getstate()
    load_tasks("reasoning_gym:list_functions", max_samples=3, seed=1)
    assert random.getstate() == state


def test_sizes() -> None:
    assert len(load_tasks("reasoning_gym:chain_sum")) == 500
    assert len(load_tasks("reasoning_gym:chain_sum?size=7")) == 7
    assert len(load_tasks("reasoning_gym:chain_sum?size=7", max_samples=3)) == 3


@pytest.mark.parametrize(
    "name",
    ["chain_sum", "list_functions", "n_queens", "spiral_matrix", "simple_integration", "acre", "bitwise_arithmetic"],
)
def test_the_right_answer_passes_and_scores_are_the_librarys(name: str, reward: ReasoningGymReward) -> None:
    from mrl.data.reasoning_gym import dataset, entry

    tasks = load_tasks(f"reasoning_gym:{name}", max_samples=3, seed=5)
    right = [str(task.columns["answer"]) for task in tasks]
    texts = [*right, *(f"I think: <answer> {answer} </answer>" for answer in right), *("dunno" for _ in right)]
    scores = score(reward, list(zip(tasks * 3, texts, strict=True)))
    assert scores.values[:6] == [1.0] * 6
    assert not scores.errors
    for task, text, value in zip(tasks * 3, texts, scores.values, strict=True):
        recipe = dict(task.columns["reasoning_gym"])
        made = entry(**recipe)
        recipe.pop("index")
        assert value == pytest.approx(dataset(**recipe).score_answer(extract_answer(text), made))


def test_answers_are_never_run(reward: ReasoningGymReward, tmp_path: Path) -> None:
    target = tmp_path / "made"
    attacks = [f"open({str(target)!r}, 'w')", f"__import__('pathlib').Path({str(target)!r}).touch()", "exit()"]
    for name in ("spiral_matrix", "simple_integration", "n_queens", "countdown"):
        tasks = load_tasks(f"reasoning_gym:{name}", max_samples=1, seed=5)
        scores = score(reward, [(tasks[0], text) for text in attacks])
        assert all(value is not None and value < 0.5 for value in scores.values)
    assert not target.exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("reasoning_gym:chain_sm", "no task 'chain_sm'; did you mean chain_sum"),
        ("reasoning_gym", "no task ''"),
        ("reasoning_gym:chain_sum?min_trms=2", "no option 'min_trms'; did you mean 'min_terms'"),
        ("reasoning_gym:chain_sum?min_terms=-1", "min_terms must be positive"),
        ("reasoning_gym:chain_sum?min_terms", "not of the form option=value"),
        ("reasoning_gym:chain_sum?size=none", "size is 'none'"),
        ("reasoning_gmy:chain_sum", "did you mean 'reasoning_gym'"),
    ],
)
def test_mistakes_are_named(name: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_tasks(name, max_samples=2)


def test_its_verifier_is_the_reward_unless_another_is_named() -> None:
    def rewards(**options: Any) -> Any:
        return OrchestratorConfig.from_flat(**options).reward.reward_funcs

    assert rewards(dataset_name="reasoning_gym:chain_sum") == "reasoning_gym"
    assert rewards(dataset_name="reasoning_gym:chain_sum", reward_funcs="math_verify") == "math_verify"
    assert rewards(dataset_name="tiny-code") is None
    assert rewards(dataset_name="org/name") is None


def test_other_tasks_are_refused(reward: ReasoningGymReward) -> None:
    with pytest.raises(RewardError, match="these are others"):
        reward.check_columns(["answer"])


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"pip install 'mrl\[reasoning-gym\]'"):
        load_tasks("reasoning_gym:chain_sum")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["orchestrated", "simple"])
def test_a_run_on_it(mode: str, tiny_model: str, tmp_path: Path) -> None:
    options = {} if mode == "simple" else {"num_rollout_workers": 1, "weight_sync_method": "direct"}
    MRLTrainer(
        model=tiny_model,
        device="cpu",
        mode=mode,
        dataset_name="reasoning_gym:chain_sum?max_digits=1",
        eval_split="test",
        eval_samples=4,
        max_samples=8,
        max_steps=1,
        batch_size=2,
        max_completion_length=8,
        temperature=1.0,
        top_p=1.0,
        run_dir=str(tmp_path / "r"),
        report_to=[],
        **options,
    ).train()
    rows = list(read_rows(tmp_path / "r", "rollouts"))
    assert len(rows) == 8
    assert all(row["status"] == "ok" and row["rewards"] == {"reasoning_gym": row["reward"]} for row in rows)
    assert len(list(read_rows(tmp_path / "r", "eval_rollouts"))) == 8
