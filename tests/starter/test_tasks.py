"""The shipped tasks: distinct, solvable, strict about mistakes, and the same as the generator makes."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from mrl import starter
from mrl.starter.behaviour import outputs, signature
from mrl.starter.corpus import lessons
from mrl.starter.families import FAMILIES
from mrl.starter.generate import Task, TaskSet, generate_tasks, kind_of, write_jsonl
from mrl.starter.mistakes import mistakes


@pytest.fixture(scope="module")
def generated() -> TaskSet:
    return generate_tasks()


@pytest.fixture(scope="module")
def shipped() -> dict[str, list[Task]]:
    return {split: [Task(**row) for row in starter.load_tasks(split)] for split in ("train", "heldout")}


def passes(program: str, task: Task) -> bool:
    """Only for programs of this package's own making: runs them here."""
    names: dict = {}
    try:
        exec("\n".join([program, *task.testcases]), names)
    except Exception:
        return False
    return True


@pytest.mark.slow
def test_the_shipped_files_are_what_the_generator_makes(generated: TaskSet, tmp_path: Path) -> None:
    for split in ("train", "heldout"):
        write_jsonl(getattr(generated, split), tmp_path / f"{split}.jsonl")
        assert (tmp_path / f"{split}.jsonl").read_bytes() == (starter.TASKS_DIR / f"{split}.jsonl").read_bytes()


def test_there_are_enough_tasks_of_enough_families(shipped: dict[str, list[Task]]) -> None:
    assert len(shipped["train"]) + len(shipped["heldout"]) >= 2000
    assert 250 <= len(shipped["heldout"]) <= 300
    for tasks in shipped.values():
        counts = Counter(task.family for task in tasks)
        assert set(counts) == set(FAMILIES)
        assert len(counts) >= 8
        assert min(counts.values()) >= 20
    assert sum(path.stat().st_size for path in starter.TASKS_DIR.iterdir()) <= 1_500_000


def test_ids_and_prompts_are_unique(shipped: dict[str, list[Task]]) -> None:
    tasks = shipped["train"] + shipped["heldout"]
    assert len({task.id for task in tasks}) == len(tasks)
    assert len({task.prompt for task in tasks}) == len(tasks)


def test_no_two_tasks_ask_for_the_same_function(shipped: dict[str, list[Task]]) -> None:
    tasks = shipped["train"] + shipped["heldout"]
    assert len({signature(task.solution, kind_of(task)) for task in tasks}) == len(tasks)


def test_every_solution_passes_its_tests(shipped: dict[str, list[Task]]) -> None:
    for task in shipped["train"] + shipped["heldout"]:
        assert 4 <= len(task.testcases) <= 8
        assert passes(task.solution, task), task.id


def test_mistaken_solutions_fail(shipped: dict[str, list[Task]]) -> None:
    passed = total = 0
    for task in random.Random(0).sample(shipped["train"], 100):
        for texts in mistakes(task.solution).values():
            for program in texts:
                if signature(program, kind_of(task)) != signature(task.solution, kind_of(task)):
                    total += 1
                    passed += passes(program, task)
    assert total > 500
    assert passed / total < 0.02


@pytest.mark.slow
def test_no_demonstration_behaves_like_a_heldout_task(generated: TaskSet) -> None:
    heldout = generated.heldout_signatures()
    kinds = {family: kind_of(task) for task in generated.heldout for family in [task.family]}
    for lesson in lessons(300, generated, seed=1):
        programs = [lesson.right, *(text for texts in lesson.wrong.values() for text in texts)]
        assert heldout.isdisjoint(signature(program, kinds[lesson.family]) for program in programs)


@pytest.mark.slow
def test_heldout_step_sequences_are_new(generated: TaskSet) -> None:
    reserved = generated.reserved_shapes
    assert {family for family, _ in reserved} == {"number_steps", "string_steps", "list_steps"}
    # The prompts of the drafts that training may use never name a reserved sequence, so neither do the train tasks.
    rng = random.Random(0)
    train_prompts = {task.prompt for task in generated.train}
    for family, _ in sorted({(family, "") for family, _ in reserved}):
        for _ in range(3000):
            draft = FAMILIES[family].draw(rng)
            if (family, draft.shape) in reserved:
                assert draft.prompt not in train_prompts


def test_the_signature_tells_functions_apart_and_ignores_their_text() -> None:
    assert signature("def f(n):\n    return n + n\n", "number") == signature("def f(n):\n    return 2 * n\n", "number")
    assert signature("def f(n):\n    return n > 3\n", "number") == signature("def f(n):\n    return n >= 4\n", "number")
    assert signature("def f(n):\n    return n > 3\n", "number") != signature("def f(n):\n    return n > 4\n", "number")
    assert outputs("def f(n):\n    return 1 // n\n", [(0,), (1,)]) == ["raises ZeroDivisionError", "1"]


def test_an_unknown_split_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'test'.*train, heldout"):
        starter.load_tasks("test")  # type: ignore[arg-type]
