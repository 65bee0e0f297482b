"""The starter kit: a policy of 0.8 million parameters and small Python functions for it to write.

Both are data made by `scripts/build_starter.py`, so that a first run needs no download: `STARTER_DIR` is an ordinary
Hugging Face model folder, `TASKS_DIR` holds one JSON line per task.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, get_args

STARTER_DIR = Path(__file__).parent / "policy"
"""Model folder: `AutoModelForCausalLM.from_pretrained(STARTER_DIR)`."""

TASKS_DIR = Path(__file__).parent / "tasks"
"""`train.jsonl` and `heldout.jsonl`; no function is in both."""

Split = Literal["train", "heldout"]


def load_tasks(split: Split) -> list[dict[str, Any]]:
    """The rows of one split: `id`, `prompt` (asked as the user), `testcases` (assert lines), `family` and `solution`.

    Raises ValueError for a split that does not exist.
    """
    if split not in get_args(Split):
        raise ValueError(f"the starter tasks have no split {split!r}; take one of {', '.join(get_args(Split))}")
    lines = (TASKS_DIR / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]
