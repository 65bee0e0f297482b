"""`reasoning_gym`: the verifier of each task of a `reasoning_gym:…` dataset."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterable
from typing import Any

from mrl.data.reasoning_gym import COLUMN, dataset, entry
from mrl.errors import RewardError
from mrl.rewards.base import RewardRequest, Scores, completion_text
from mrl.rewards.verifier import VerifierFailed, VerifierPool

LIBRARIES = ("reasoning_gym", "sympy")
SECONDS = 20.0
EVALUATE_ANSWERS = ("string_insertion", "spiral_matrix", "number_sorting", "binary_matrix", "n_queens")
"""Modules of the library whose verifiers call `eval` on what the model answered."""
TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ReasoningGymReward:
    """What the task's own verifier gives, 0 to 1. The answer is what stands in the last `<answer>…</answer>`, else the
    whole completion. A verifier that fails leaves the row without a reward."""

    name = "reasoning_gym"
    bounded = True  # by the pool
    independent = True
    logged = ()

    def __init__(self) -> None:
        self._pool = VerifierPool("mrl.rewards.reasoning_gym:judge", seconds=SECONDS)

    def check_columns(self, columns: Iterable[str]) -> None:
        """Raises RewardError when the tasks are not the library's."""
        if COLUMN not in columns:
            raise RewardError(
                "reward_funcs: 'reasoning_gym' scores tasks of a dataset reasoning_gym:TASK, e.g. "
                "--dataset reasoning_gym:chain_sum; these are others"
            )

    async def score(self, requests: list[RewardRequest], *, trainer_state: Any) -> Scores:
        """Verify every completion. Raises RewardError for tasks that are not the library's."""
        questions = []
        for request in requests:
            self.check_columns(request.columns)
            questions.append({"recipe": request.columns[COLUMN], "text": completion_text(request.completion)})
        scores = Scores([None] * len(requests))
        for row, answer in enumerate(await self._pool.ask_all(questions)):
            if isinstance(answer, VerifierFailed) or "error" in answer:
                reason = str(answer) if isinstance(answer, VerifierFailed) else answer["error"]
                scores.errors[row] = f"{self.name}: {reason}"
            else:
                scores.values[row] = answer["value"]
        return scores

    def close(self) -> None:
        """End the processes."""
        self._pool.close()


def extract_answer(text: str) -> str:
    """What a completion answers."""
    tagged = TAGGED.findall(text)
    return (tagged[-1] if tagged else text).strip()


def judge(recipe: dict[str, Any], text: str) -> float:
    """Runs in the child."""
    answer = extract_answer(text)
    made = _entry(**recipe)
    verifier = dataset(recipe["task"], recipe["options"], recipe["seed"], recipe["size"])
    _read_only_literals(type(verifier).__module__)
    if "__" in answer:  # Python's way into everything, which no answer needs; some verifiers have sympy evaluate it
        return 0.0
    return float(verifier.score_answer(answer, made))


@functools.lru_cache(maxsize=4096)
def _entry(**recipe: Any) -> dict[str, Any]:
    return entry(**recipe)


def _read_only_literals(module: str) -> None:
    """Some verifiers read lists in an answer with `eval`: have them read literals, and nothing else."""
    if module.rpartition(".")[2] in EVALUATE_ANSWERS:
        vars(sys.modules[module])["eval"] = ast.literal_eval
