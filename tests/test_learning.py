"""The quickstart's policy gets better, and only when the rewards mean something; tiny models learn in
tests/test_trainer.py."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mrl import MRLTrainer
from mrl.cli.flags import config_from
from mrl.rewards import reward_helper_function
from mrl.store.run import read_rows

MRL = Path(sys.executable).parent / "mrl"


def pass_rates(run: Path) -> list[float]:
    """On held-out tasks, before the first step and after the last."""
    rates = [row["eval/pass_rate"] for row in read_rows(run, "eval_metrics")]
    assert 0.25 <= rates[0] <= 0.55, "the starter policy answers two fifths right"
    return [rates[0], rates[-1]]


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("steps", "reached"),
    [pytest.param(30, 0.53, marks=pytest.mark.slow), pytest.param(300, 0.75, marks=pytest.mark.soak)],
)
def test_the_quickstart_learns(tmp_path: Path, steps: int, reached: float) -> None:
    """By its command, as installed. docs/quickstart.md has what the whole of it reaches: 82 to 86 %."""
    flags = ["--max-steps", str(steps), "--eval-steps", "1000", "--eval-samples", "200", "--run-dir", "run"]
    done = subprocess.run([MRL, "train", "quickstart", *flags], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    before, after = pass_rates(tmp_path / "run")
    assert after >= max(reached, before + 0.1), (before, after)


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_the_quickstart_learns_nothing_from_shuffled_rewards(tmp_path: Path) -> None:
    """Rewards of the same distribution, dealt out at random within the batch: the pass rate does not rise."""
    rng = random.Random(0)

    def shuffled(completions: list[Any], testcases: list[Any], **_: Any) -> list[float | None]:
        rewards = reward_helper_function(completions, testcases)
        rng.shuffle(rewards)
        return rewards

    sizes = {"max_steps": 60, "eval_steps": 1000, "eval_samples": 200, "run_dir": str(tmp_path / "run")}
    MRLTrainer(config_from("quickstart", {**sizes, "report_to": [], "reward_funcs": shuffled})).train()
    before, after = pass_rates(tmp_path / "run")
    assert after <= before + 0.08, (before, after)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_policy_taught_sums_by_example_gets_better_by_reward(tmp_path: Path) -> None:
    """examples/sums.py: reasoning-gym's sums, held-out pass rate before and after the rewards."""
    example = Path(__file__).parent.parent / "examples" / "sums.py"
    command = [sys.executable, str(example), "--max-steps", "100"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    run = max((tmp_path / "runs").iterdir(), key=lambda folder: folder.stat().st_mtime)
    rates = [row["eval/pass_rate"] for row in read_rows(run, "eval_metrics")]
    assert rates[0] > 0.2  # by example
    assert rates[-1] > rates[0] + 0.1  # by reward
