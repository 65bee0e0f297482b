"""`math_verify`: does a completion's answer equal the dataset's (github.com/huggingface/Math-Verify)?"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterable
from typing import Any

from mrl.errors import RewardError
from mrl.rewards.base import RewardRequest, Scores, completion_text
from mrl.rewards.evaluating import close_sympy
from mrl.rewards.verifier import UNREADABLE, Outcome, VerifierPool

COLUMNS = ("answer", "solution")
LIBRARIES = ("math_verify", "sympy")
SECONDS = 5
"""The library's own limit for reading and for comparing; its time-out counts as not equal."""
MARKED = ("$", "\\boxed", "\\(", "\\[", "\\begin")
"""Text that says itself where its mathematics are."""


class MathVerifyReward:
    """1 where the completion's last answer equals the column `answer` (or `solution`), else 0, also where it has none.

    A row whose own answer cannot be read is left without a reward.
    """

    name = "math_verify"
    bounded = True  # by the pool
    independent = True
    logged = ()

    def __init__(self) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise RewardError("reward_funcs: math_verify is not installed; pip install 'mrl[math-verify]'")
        # Signals interrupt its Python; what hangs in C is killed.
        self._pool = VerifierPool("mrl.rewards.math_verify:prepare", seconds=4 * SECONDS)

    def check_columns(self, columns: Iterable[str]) -> None:
        """Raises RewardError when the dataset has no answers."""
        columns = list(columns)
        if not set(COLUMNS) & set(columns):
            raise RewardError(
                "reward_funcs: 'math_verify' compares with the dataset column 'answer' (or 'solution'); not among the "
                f"columns: {', '.join(columns) or 'none'}. Rename one, e.g. --rename gold=answer"
            )

    async def score(self, requests: list[RewardRequest], *, trainer_state: Any) -> Scores:
        """Compare every completion. Raises RewardError when there is no column to compare with."""
        questions = []
        for request in requests:
            self.check_columns(request.columns)
            gold = request.columns[next(name for name in COLUMNS if name in request.columns)]
            questions.append(({"gold": _text(gold)}, completion_text(request.completion)))
        scores = Scores([None] * len(requests))
        parsed: list[str | None] = [None] * len(requests)
        for row, outcome in enumerate(await self._pool.ask_all(questions)):
            if outcome is UNREADABLE:
                gold = questions[row][0]["gold"]
                scores.errors[row] = f"{self.name}: cannot read the dataset's answer {gold!r:.80}"
            elif not outcome.asked:
                scores.errors[row] = f"{self.name}: {outcome.detail}"
            else:
                scores.values[row], parsed[row] = _checked(outcome)
        scores.extra["math_answer"] = parsed
        return scores

    def close(self) -> None:
        """End the processes."""
        self._pool.close()


def prepare(gold: str) -> Callable[[str], tuple[float, str | None]] | None:
    """Runs in the isolated process. None when `gold` cannot be read; else what gives an answer's score, and what was
    read of it."""
    from math_verify import parse, verify

    close_sympy()
    wanted = _read_gold(gold)
    if not wanted:
        return None

    def judge(answer: str) -> tuple[float, str | None]:
        found = parse(answer, parsing_timeout=SECONDS)
        if not found:
            return 0.0, None
        return float(verify(wanted, found, timeout_seconds=SECONDS)), str(found[-1])[:200]

    return judge


def _checked(outcome: Outcome) -> tuple[float, str | None]:
    """The score and what was read, or 0 and why there is neither."""
    match outcome.value:
        case (0.0 | 1.0) as score, None | str() as answer:
            return float(score), answer
    return 0.0, f"({outcome.detail or 'protocol'})"


def _read_gold(gold: str) -> list[Any]:
    """The mathematics of a dataset's answer: after GSM8K's `####`, in its own LaTeX, or, where bare, all of it."""
    from math_verify import parse

    gold = gold.rpartition("####")[2].strip()
    bare = not any(mark in gold for mark in MARKED) and not re.search(r"[A-Za-z]{2}\s+[A-Za-z]{2}", gold)
    attempts = [f"\\boxed{{{gold}}}", gold] if bare else [gold]
    for text in attempts if gold else []:
        if found := parse(text, parsing_timeout=SECONDS):
            return list(found)
    return []


def _text(gold: Any) -> str:
    return str(int(gold)) if isinstance(gold, float) and gold.is_integer() else str(gold)
