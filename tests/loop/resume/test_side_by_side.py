"""Runs that are the same, side by side on a machine with too few cores for them, are the same to the last bit."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ENTRY = "import sys; from mrl.cli.main import main; main(sys.argv[1:])"


def mrl(*arguments: str, threads: int, waiting: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", ENTRY, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": waiting},
    )


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("runs", "steps", "tasks", "waiting"),
    [
        pytest.param(2, 2, 8, "PASSIVE", marks=pytest.mark.slow),
        pytest.param(4, 6, 16, "ACTIVE", marks=pytest.mark.soak),
    ],
)
def test_the_quickstart_several_times_at_once(tmp_path: Path, runs: int, steps: int, tasks: int, waiting: str) -> None:
    """With two threads each, which sleep or spin while they wait for each other. Replaying a step with another number
    in the environment finds what was recorded."""
    recipe = yaml.safe_load((Path(__file__).parents[3] / "mrl/recipes/quickstart.yaml").read_text())
    recipe = {name: value for name, value in recipe.items() if not name.startswith("eval_")}
    recipe |= {"max_steps": steps, "batch_size": tasks, "report_to": ["jsonl"]}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    folders = [tmp_path / f"run-{number}" for number in range(runs)]
    command = ("train", str(tmp_path / "recipe.yaml"), "--run-dir")
    running = [mrl(*command, str(folder), threads=2, waiting=waiting) for folder in folders]
    for process in running:
        out, _ = process.communicate()
        assert process.returncode == 0, out
    models = [(folder / f"checkpoints/step-{steps}/model.safetensors").read_bytes() for folder in folders]
    assert len({hashlib.sha256(model).hexdigest() for model in models}) == 1
    replayed = mrl("replay", str(folders[0]), "--step", str(steps), threads=1, waiting=waiting)
    out, _ = replayed.communicate()
    assert replayed.returncode == 0, out
