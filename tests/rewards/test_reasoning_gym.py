"""reasoning-gym's tasks and verifiers: the same tasks for the same seed, the same scores as the library's own."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
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
from mrl.rewards.verifier import VerifierPool
from mrl.store.run import read_rows
from mrl.types import Task
from tests.soak import but, slow_but

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


SHIPPED = [
    *("chain_sum", "list_functions", "n_queens", "spiral_matrix", "simple_integration", "acre", "bitwise_arithmetic"),
]
EVALUATED = ["countdown", "puzzle24", "polynomial_multiplication", "simple_integration", "n_queens"]
"""Tasks whose verifiers evaluate what they are given."""
MAKE = """
import json, random, sys
import reasoning_gym
from mrl.data import load_tasks
rows = []
for name, options in json.load(sys.stdin):
    random.random()
    state = random.getstate()
    rows.append([[task.id, task.prompt, task.columns] for task in load_tasks("reasoning_gym:" + name, **options)])
    assert random.getstate() == state
print("TASKS", json.dumps(rows))
"""
Draw = tuple[str, dict[str, Any]]


def made_elsewhere(draws: list[Draw]) -> list[list[Task]]:
    """What an interpreter of hash seed 0 makes of each draw."""
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    done = subprocess.run(
        [sys.executable, "-c", MAKE],
        env=environment,
        input=json.dumps(draws),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [[Task(*fields) for fields in rows] for rows in json.loads(done.stdout.rpartition("TASKS ")[2])]


@pytest.fixture(scope="module")
def tasks() -> dict[str, list[Task]]:
    """Three tasks of some kinds."""
    names = sorted({*SHIPPED, *EVALUATED})
    made = made_elsewhere([(name, {"max_samples": 3, "seed": 5}) for name in names])
    return dict(zip(names, made, strict=True))


def test_the_same_seed_gives_the_same_tasks_whatever_else_is_drawn() -> None:
    name = "chain_sum?min_terms=2&max_terms=3"
    options: dict[str, Any] = {"max_samples": 6, "seed": 3}
    first, again, other, test, test_again, *sizes, by_global, by_global_again, from_sets = made_elsewhere(
        [
            *((name, options | more) for more in ({}, {}, {"seed": 4}, {"split": "test"}, {"split": "test"})),
            *(("chain_sum", {}), ("chain_sum?size=7", {}), ("chain_sum?size=7", {"max_samples": 3})),
            *(("list_functions", {"max_samples": 3}) for _ in range(2)),  # draws from Python's global generator
            ("polynomial_multiplication", options),  # draws from sets
        ]
    )
    assert load_tasks("reasoning_gym:polynomial_multiplication", **options) == from_sets  # with another hash seed
    assert first == again
    assert len({task.id for task in first}) == len(first) == 6
    assert all("=" in task.prompt and task.columns["answer"] for task in first)
    assert [task.prompt for task in other] != [task.prompt for task in first]
    assert not {task.prompt for task in test} & {task.prompt for task in first}
    assert test == test_again
    assert by_global == by_global_again
    assert [len(tasks) for tasks in sizes] == [500, 7, 3]


@pytest.mark.parametrize("name", [*SHIPPED, "polynomial_multiplication"])
def test_the_right_answer_passes_and_scores_are_the_librarys(
    name: str, reward: ReasoningGymReward, tasks: dict[str, list[Task]]
) -> None:
    from mrl.data.reasoning_gym import dataset, entry

    right = [str(task.columns["answer"]) for task in tasks[name]]
    texts = [*right, *(f"I think: <answer> {answer} </answer>" for answer in right), *("dunno" for _ in right)]
    scores = score(reward, list(zip(tasks[name] * 3, texts, strict=True)))
    assert scores.values[:6] == [1.0] * 6
    assert not scores.errors
    if name == "polynomial_multiplication":
        return  # made here, with another hash seed, it is another task
    for task, text, value in zip(tasks[name] * 3, texts, scores.values, strict=True):
        recipe = dict(task.columns["reasoning_gym"])
        made = entry(**recipe)
        recipe.pop("index")
        assert value == pytest.approx(dataset(**recipe).score_answer(extract_answer(text), made))


@pytest.mark.slow
def test_every_tasks_own_answer_is_right(reward: ReasoningGymReward) -> None:
    from reasoning_gym.factory import DATASETS

    names = sorted(set(DATASETS) - {"composite"})
    made = made_elsewhere([(name, {"max_samples": 1, "seed": 11}) for name in names])
    tasks = [task for tasks in made for task in tasks if task.columns["answer"] is not None]
    assert len(tasks) >= 75
    scores = score(reward, [(task, task.columns["answer"]) for task in tasks])
    assert not scores.errors
    values = zip(tasks, scores.values, scores.extra["verifier"], strict=True)
    assert [(task.id, value, why) for task, value, why in values if value != 1.0] == []


SPEAK = """import gc, io
for found in gc.get_objects():
    if isinstance(found, io.TextIOWrapper) and found.writable():
        found.write(LINE)
        found.flush()
"""
FIND = """import os, sys
frame = sys._getframe()
while "token" not in frame.f_locals:
    frame = frame.f_back
body = frame.f_locals["token"] + b"1.0"
os.write(3, len(body).to_bytes(4, "big") + b"V" + body)
"""
ANSWERS_THAT_ACT = [
    *(f"exec({SPEAK.replace('LINE', repr(line))!r})" for line in ('{"value": 1.0}\n', "{")),
    f"exec({FIND!r})",
    f"sin({'exec(' + repr(FIND) + ')'!r})",
    'eval("exit()")',
    "open('made', 'w')",
    "__import__('pathlib').Path('made').touch()",
    "lambdify(x, 'exit()')(1)",
    "(lambda: 1)()",
    "Integral(x**2, x)",
    "9**9**9**9",
    "(" * 50_000,
]


@pytest.mark.parametrize(
    "name",
    [*slow_but([], ["countdown", "simple_integration", "n_queens"]), *but([], EVALUATED[1:3])],
)
def test_answers_are_read_and_never_run(name: str, tasks: dict[str, list[Task]]) -> None:
    reward = ReasoningGymReward()
    reward._pool.close()
    reward._pool = VerifierPool("mrl.rewards.reasoning_gym:prepare", seconds=3, size=1)
    right = str(tasks[name][0].columns["answer"])
    try:
        texts = [text for attack in ANSWERS_THAT_ACT for text in (attack, right)]
        scores = score(reward, [(tasks[name][0], text) for text in texts])
    finally:
        reward.close()
    assert not scores.errors
    assert scores.values[1::2] == [1.0] * len(ANSWERS_THAT_ACT)
    assert [value for value in scores.values[::2] if value is None or value >= 0.5] == []


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
