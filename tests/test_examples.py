"""Every example runs as its header says, on few steps."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mrl.store.run import read_rows

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    return tmp_path


def run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=os.environ.copy(), timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def mrl(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "mrl.cli", *arguments]


def test_python_api(folder: Path) -> None:
    out = run([sys.executable, "examples/python_api.py", "--max-steps", "2"], folder)
    assert "after 2 steps" in out


@pytest.mark.slow
def test_two_rewards(folder: Path) -> None:
    out = run(
        mrl("train", "two_rewards.yaml", "--max-steps", "2", "--eval-samples", "4", "--json"), folder / "examples"
    )
    metrics = json.loads(out)["metrics"]
    expected = 0.9 * metrics["reward/sandbox/mean"] + 0.1 * metrics["reward/short_and_fenced/mean"]
    assert metrics["reward/mean"] == pytest.approx(expected)
    assert metrics["fenced_fraction"] > 0.5
    assert "train/kl" in metrics


@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_async_vllm(folder: Path, engine: str) -> None:
    memory = ["--vllm-kv-cache-gb", "0.5"] if engine == "vllm" else []
    command = mrl("train", "async_vllm.yaml", "--engine", engine, *memory, "--max-steps", "4", "--eval-samples", "4")
    metrics = json.loads(run([*command, "--json"], folder / "examples"))["metrics"]
    assert 0 <= metrics["rollout/staleness_max"] <= 2
    assert metrics["sync/policy_version"] == 4


def test_custom_loss(folder: Path) -> None:
    out = run([sys.executable, "examples/custom_loss.py"], folder)
    largest = float(out.rpartition("ratio up to ")[2])
    assert largest > 1.0  # the second update of a step is off the policy that sampled
    lines = (EXAMPLES / "custom_loss.py").read_text().splitlines()
    assert len(lines) < 30


def test_tasks_with_test_cases(folder: Path) -> None:
    out = run(mrl("eval", "starter", "--dataset", "examples/tasks.jsonl", "--max-tokens", "64", "--json"), folder)
    report = json.loads(out)
    assert report["tasks"] == 4
    assert report["unscored"] == 0


@pytest.mark.slow
def test_sums(folder: Path) -> None:
    """Two steps of each stage; that it learns is seen in tests/test_learning.py."""
    out = run([sys.executable, "examples/sums.py", "--sft-steps", "2", "--max-steps", "2"], folder)
    assert "after 2 steps" in out


@pytest.mark.slow
def test_math_answers(folder: Path) -> None:
    small = ["--model", "starter", "--max-steps", "1", "--max-completion-length", "16", "--json"]
    metrics = json.loads(run(mrl("train", "math_answers.yaml", *small), folder / "examples"))["metrics"]
    assert metrics["reward/math_verify/mean"] == metrics["reward/mean"]
    assert metrics["rollout/failed_fraction"] == 0


@pytest.mark.slow
def test_sft(folder: Path) -> None:
    out = run(mrl("train", "sft.yaml", "--num-epochs", "3", "--run-name", "r"), folder / "examples")
    assert "loss.png" in out
    assert len(list(read_rows(folder / "examples" / "runs" / "r", "metrics"))) == 3


def test_every_example_is_run_here() -> None:
    named = Path(__file__).read_text()
    for path in EXAMPLES.iterdir():
        assert path.name in named or path.name in ("my_rewards.py", "answers.jsonl", "math_answers.jsonl"), (
            f"{path.name} is run by no test"
        )
