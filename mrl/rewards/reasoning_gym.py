"""`reasoning_gym`: the verifier of each task of a `reasoning_gym:…` dataset."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Callable, Iterable
from typing import Any

from mrl.data.reasoning_gym import COLUMN, dataset, entry
from mrl.errors import RewardError
from mrl.rewards.base import RewardRequest, Scores, completion_text
from mrl.rewards.evaluating import close_sympy, evaluate
from mrl.rewards.verifier import Outcome, VerifierPool

LIBRARIES = ("reasoning_gym", "sympy")
SECONDS = 20.0
MAKE_SECONDS = 120.0
"""For a task, once: some are searched for."""
KEPT = 4096
"""Tasks that are remembered as they were made."""
EVALUATE_ANSWERS = ("string_insertion", "spiral_matrix", "number_sorting", "binary_matrix", "n_queens")
"""Modules of the library whose verifiers call `eval` on what the model answered."""
EVALUATE_TASKS = ("bitwise_arithmetic",)
"""Modules whose verifiers compute the task's own expression once more."""
OPEN, CLOSE = "<answer>", "</answer>"


class ReasoningGymReward:
    """What the task's own verifier gives, 0 to 1. The answer is what stands in the last `<answer>…</answer>`, else the
    whole completion. An answer that the verifier comes to no end with, or that ends its process, earns 0; a task that
    cannot be made again leaves the row without a reward."""

    name = "reasoning_gym"
    bounded = True  # by the pool
    independent = True
    logged = ()

    def __init__(self) -> None:
        self._pool = VerifierPool("mrl.rewards.reasoning_gym:prepare", seconds=SECONDS)
        self._made: dict[str, Outcome] = {}

    def check_columns(self, columns: Iterable[str]) -> None:
        """Raises RewardError when the tasks are not the library's."""
        if COLUMN not in columns:
            raise RewardError(
                "reward_funcs: 'reasoning_gym' scores tasks of a dataset reasoning_gym:TASK, e.g. "
                "--dataset reasoning_gym:chain_sum; these are others"
            )

    async def score(self, requests: list[RewardRequest], *, trainer_state: Any) -> Scores:
        """Verify every completion. Raises RewardError for tasks that are not the library's."""
        for request in requests:
            self.check_columns(request.columns)
        made = await self._make([request.columns[COLUMN] for request in requests])
        questions = {
            row: ({"recipe": task, "made": outcome.value}, extract_answer(completion_text(requests[row].completion)))
            for row, (task, outcome) in enumerate(made)
            if outcome.asked
        }
        outcomes = [outcome for _, outcome in made]
        for row, outcome in zip(questions, await self._pool.ask_all(list(questions.values())), strict=True):
            outcomes[row] = outcome
        scores = Scores([None] * len(requests))
        details: list[str | None] = [None] * len(requests)
        for row, outcome in enumerate(outcomes):
            if outcome.asked:
                scores.values[row], details[row] = _checked(outcome)
            else:
                scores.errors[row] = f"{self.name}: {outcome.detail}"
        scores.extra["verifier"] = details
        return scores

    async def _make(self, recipes: list[dict[str, Any]]) -> list[tuple[dict[str, Any], Outcome]]:
        """Each task as its verifier needs it, made once for all its answers: some take seconds."""
        keys = [json.dumps(recipe, sort_keys=True) for recipe in recipes]
        known = {key: self._made[key] for key in keys if key in self._made}
        new = {key: dict(recipe) for key, recipe in zip(keys, recipes, strict=True) if key not in known}
        tasks = [{"recipe": recipe} for recipe in new.values()]
        for key, outcome in zip(new, await self._pool.prepare_all("make", tasks, MAKE_SECONDS), strict=True):
            known[key] = outcome
            if outcome.asked:
                self._made[key] = outcome
        while len(self._made) > KEPT:
            del self._made[next(iter(self._made))]
        return [(dict(recipe), known[key]) for key, recipe in zip(keys, recipes, strict=True)]

    def close(self) -> None:
        """End the processes."""
        self._pool.close()


def extract_answer(text: str) -> str:
    """What a completion answers. Linear time: a pattern would look for the end again from every opening."""
    answer, start = text, text.find(OPEN)
    while start >= 0:
        end = text.find(CLOSE, start)
        if end < 0:
            break
        answer = text[start + len(OPEN) : end]
        start = text.find(OPEN, end)
    return answer.strip()


def make(task: dict[str, Any]) -> dict[str, Any]:
    """Runs in an isolated process that sees no answer."""
    return entry(**task["recipe"])


def prepare(recipe: dict[str, Any], made: dict[str, Any] | None) -> Callable[[str], float]:
    """Runs in the isolated process: the task's own verifier. made: by `make`, None when it is no plain data."""
    made = entry(**recipe) if made is None else made
    verifier = dataset(recipe["task"], recipe["options"], recipe["seed"], recipe["size"])
    close_sympy()
    _read_only_values(type(verifier).__module__)
    return lambda answer: float(verifier.score_answer(answer, made))


def _checked(outcome: Outcome) -> tuple[float, str | None]:
    """The score, and why there is none. What is no score, the library's or not, is the answer's doing."""
    value = outcome.value
    if type(value) is float and 0 <= value <= 1:
        return value, None
    return 0.0, outcome.detail or "protocol: no score came back"


def _read_only_values(module: str) -> None:
    """Some verifiers read lists, or what the task was, with `eval`: have them read values, and nothing else."""
    name = module.rpartition(".")[2]
    if name in EVALUATE_ANSWERS:
        vars(sys.modules[module])["eval"] = ast.literal_eval
    elif name in EVALUATE_TASKS:
        vars(sys.modules[module])["eval"] = evaluate
