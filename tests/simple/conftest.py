"""Runs in simple mode, small enough for seconds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mrl import train_simple
from mrl.loop.recorded_run import RunResult

TASKS = [{"prompt": f"say {i}", "want": "a"} for i in range(10)]
PAIRS = [{"prompt": f"say {i}", "chosen": "aaa", "rejected": "bbbb"} for i in range(10)]
ANSWERS = [{"prompt": f"say {i}", "completion": "aaa"} for i in range(10)]
DATA: dict[str, list[dict[str, Any]]] = {
    **dict.fromkeys(("grpo", "rloo", "online_dpo"), TASKS),
    **dict.fromkeys(("dpo", "reward"), PAIRS),
    "sft": ANSWERS,
    "kto": [{**row, "label": index % 2 == 0} for index, row in enumerate(ANSWERS)],
}
ONLINE = ("grpo", "rloo", "online_dpo")


def distinct(completions: list[str], want: list[str], **_: Any) -> list[float]:
    """A reward that differs within every group of random completions, and tells that columns arrive."""
    assert set(want) == {"a"}
    assert all(isinstance(text, str) for text in completions)
    return [len(set(text)) / 8 for text in completions]


@pytest.fixture
def simple(tiny_model: str, tmp_path: Path) -> Callable[..., RunResult]:
    """`train_simple` with the defaults of these tests; the run is `tmp_path / "run"`."""

    def train(algorithm: str = "grpo", **options: Any) -> RunResult:
        defaults: dict[str, Any] = {
            "model": tiny_model,
            "device": "cpu",
            "algorithm": algorithm,
            "train_dataset": DATA.get(algorithm, TASKS),
            "run_dir": str(tmp_path / "run"),
            "report_to": [],
            "max_steps": 3,
            "batch_size": 4,
            "learning_rate": 1e-2,
            "max_model_len": 256,
        }
        if algorithm in ONLINE or algorithm not in DATA:
            defaults |= {"reward_funcs": distinct, "max_completion_length": 8, "temperature": 1.0, "top_p": 1.0}
        return train_simple(**(defaults | options))

    return train
