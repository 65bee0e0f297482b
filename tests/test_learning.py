"""Learning that takes minutes: the quickstart's policy gets better, and only when the rewards mean something."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mrl import MRLTrainer, OrchestratorConfig
from mrl.evaluation import evaluate
from mrl.flags import config_from
from mrl.rewards import reward_helper_function
from mrl.store.run import read_rows

pytestmark = pytest.mark.slow

STEPS = 60


def held_out_pass_rate(model: str) -> float:
    config = OrchestratorConfig.from_flat(
        model=model,
        dataset_name="tiny-code",
        dataset_split="heldout",
        max_samples=None,
        temperature=1.0,
        top_p=1.0,
        max_completion_length=64,
        device="cpu",
    )
    return asyncio.run(evaluate(config, samples_per_task=2)).pass_at[1].mean


def train(folder: Path, **options: Any) -> float:
    config = config_from(
        "quickstart", {"max_steps": STEPS, "run_dir": str(folder), "eval_samples": 8, "report_to": [], **options}
    )
    MRLTrainer(config).train()
    return held_out_pass_rate(str(folder))


@pytest.fixture(scope="module")
def before() -> float:
    return held_out_pass_rate("starter")


@pytest.mark.timeout(1200)
def test_the_quickstart_learns(before: float, tmp_path: Path) -> None:
    assert 0.20 <= before <= 0.45
    assert train(tmp_path / "run") >= before + 0.25


@pytest.mark.timeout(1200)
def test_nothing_is_learned_from_shuffled_rewards(before: float, tmp_path: Path) -> None:
    """Rewards of the same distribution, dealt out at random within the batch: the pass rate does not rise."""
    rng = random.Random(0)

    def shuffled(completions: list[Any], testcases: list[Any], **_: Any) -> list[float | None]:
        rewards = reward_helper_function(completions, testcases)
        rng.shuffle(rewards)
        return rewards

    assert train(tmp_path / "run", reward_funcs=shuffled) <= before + 0.05


def test_a_policy_taught_sums_by_example_gets_better_by_reward(tmp_path: Path) -> None:
    """examples/sums.py: reasoning-gym's sums, held-out pass rate before and after the rewards."""
    example = Path(__file__).parent.parent / "examples" / "sums.py"
    command = [sys.executable, str(example), "--max-steps", "100"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    run = max((tmp_path / "runs").iterdir(), key=lambda folder: folder.stat().st_mtime)
    rates = [row["eval/pass_rate"] for row in read_rows(run, "eval_metrics")]
    assert rates[0] > 0.2  # by example
    assert rates[-1] > rates[0] + 0.1  # by reward
