"""Draws the starter tasks: distinct functions by behaviour, test cases that catch mistakes, two disjoint splits."""

from __future__ import annotations

import ast
import json
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from mrl.starter.behaviour import EDGES, TEXT, outputs, signature
from mrl.starter.families import FAMILIES, PARAMETERS, Draft
from mrl.starter.mistakes import mistakes

TRAIN_PER_FAMILY = 170
HELDOUT_PER_FAMILY = 22
FEWEST_TESTS, MOST_TESTS = 5, 8
CANDIDATES = 120
"""Inputs looked at per task when its test cases are chosen."""
RESERVED_SHAPES = 0.12
"""Share of the ordered sequences of steps that only held-out tasks use, in each family of steps."""


@dataclass(frozen=True)
class Task:
    """One row of the data files. `solution` is for the supervised phase and the tests; the policy never sees it."""

    id: str
    prompt: str
    testcases: list[str]
    family: str
    solution: str


@dataclass(frozen=True)
class TaskSet:
    train: list[Task]
    heldout: list[Task]
    reserved_shapes: frozenset[tuple[str, str]]
    """(family, shape) that appear in the held-out split only."""

    def heldout_signatures(self) -> set[str]:
        return {signature(task.solution, kind_of(task)) for task in self.heldout}


def generate_tasks(seed: int = 0) -> TaskSet:
    """All tasks of the two splits. The same seed gives the same tasks, in the same order."""
    seen: set[str] = set()
    train: list[Task] = []
    heldout: list[Task] = []
    all_reserved: set[tuple[str, str]] = set()
    for family in FAMILIES:
        rng = random.Random(f"{seed}/{family}")
        shapes = _shapes(family, rng)
        reserved = set(rng.sample(sorted(shapes), round(RESERVED_SHAPES * len(shapes))))
        all_reserved |= {(family, shape) for shape in reserved}
        held = _draw(family, rng, HELDOUT_PER_FAMILY, seen, reserved or None)
        kept = _draw(family, rng, TRAIN_PER_FAMILY, seen, shapes - reserved)
        for index, draft in enumerate(held + kept):
            task = Task(f"{family}/{index:04d}", draft.prompt, _test_cases(draft, rng), family, tidy(draft.program))
            (heldout if index < len(held) else train).append(task)
    random.Random(f"{seed}/order").shuffle(train)
    return TaskSet(train, heldout, frozenset(all_reserved))


def write_jsonl(tasks: list[Task], path: Path) -> None:
    path.write_text("".join(json.dumps(vars(task), ensure_ascii=False) + "\n" for task in tasks), encoding="utf-8")


def tidy(program: str) -> str:
    """The program as `ast.unparse` writes it: one spelling for right and mistaken programs alike."""
    return ast.unparse(ast.parse(program)) + "\n"


def kind_of(task: Task) -> str:
    """The kind of input that the task's function takes."""
    return next(kind for kind, names in PARAMETERS.items() if task.solution.startswith(f"def f({names}):"))


def is_worth_asking(draft: Draft) -> bool:
    """False for functions that hardly depend on their input, or that most of their mistakes equal."""
    results = Counter(outputs(draft.program, INPUTS[draft.kind]))
    return results.most_common(1)[0][1] <= 0.8 * len(INPUTS[draft.kind])


def _shapes(family: str, rng: random.Random) -> set[str]:
    """The ordered sequences of steps of a family of steps; {""} for every other family."""
    if not FAMILIES[family].draw(rng).shape:
        return {""}
    return {FAMILIES[family].draw(rng).shape for _ in range(4000)}


def _draw(family: str, rng: random.Random, count: int, seen: set[str], shapes: set[str] | None) -> list[Draft]:
    """`count` functions that are not in `seen`, which they then are; of these shapes only, None = any."""
    drafts: list[Draft] = []
    for _ in range(200 * count):
        if len(drafts) == count:
            return drafts
        draft = FAMILIES[family].draw(rng)
        if (shapes is not None and draft.shape not in shapes) or not is_worth_asking(draft):
            continue
        digest = signature(draft.program, draft.kind)
        if digest not in seen:
            seen.add(digest)
            drafts.append(draft)
    raise ValueError(f"family {family!r} has fewer than {count} distinct functions; widen its constants")


def _test_cases(draft: Draft, rng: random.Random) -> list[str]:
    """Assert lines, each kept because it catches mistaken versions that the lines before it let pass."""
    pool = INPUTS[draft.kind]
    inputs = rng.sample(pool, k=min(CANDIDATES, len(pool)))
    expected = outputs(draft.program, inputs)
    usable = [i for i, result in enumerate(expected) if not result.startswith("raises")]
    wrong = [outputs(text, inputs) for texts in mistakes(tidy(draft.program)).values() for text in texts]
    # For each input, the mistaken versions that it catches.
    caught = {i: {j for j, other in enumerate(wrong) if other[i] != expected[i]} for i in usable}
    alive = set(range(len(wrong)))
    chosen: list[int] = []
    while len(chosen) < min(MOST_TESTS, len(usable)):
        best = max((i for i in usable if i not in chosen), key=lambda i: len(caught[i] & alive))
        if not caught[best] & alive and len(chosen) >= FEWEST_TESTS:
            break
        chosen.append(best)
        alive -= caught[best]
    return [f"assert f({', '.join(map(repr, inputs[i]))}) == {expected[i]}" for i in chosen]


def _inputs() -> dict[str, list[tuple]]:
    """What test cases call `f` with: smaller and friendlier values than the probes."""
    rng = random.Random("test inputs")
    texts = ["".join(rng.choices(TEXT, k=rng.randint(3, 9))) for _ in range(150)]
    lists = [rng.choices(range(-3, 25), k=rng.randint(3, 6)) for _ in range(250)]
    pairs = [(a, b) for a in range(-3, 20, 2) for b in range(-3, 24)] + EDGES
    return {
        "number": [(n,) for n in range(-4, 41)],
        "pair": pairs,
        "text": [(text,) for text in texts],
        "list": [(items,) for items in lists],
    }


INPUTS = _inputs()
