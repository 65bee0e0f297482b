"""Runs that are the same, side by side on a machine with too few cores for them, are the same to the last bit."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

RUNS, STEPS = 4, 6
ENTRY = "import sys; from mrl.cli import main; main(sys.argv[1:])"


def mrl(*arguments: str, threads: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", ENTRY, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": str(threads)},
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_quickstart_several_times_at_once(tmp_path: Path) -> None:
    """With two threads each. Replaying a step with another number in the environment finds what was recorded."""
    recipe = yaml.safe_load((Path(__file__).parents[2] / "mrl/recipes/quickstart.yaml").read_text())
    recipe = {name: value for name, value in recipe.items() if not name.startswith("eval_")}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe | {"max_steps": STEPS, "report_to": ["jsonl"]}))
    folders = [tmp_path / f"run-{number}" for number in range(RUNS)]
    running = [mrl("train", str(tmp_path / "recipe.yaml"), "--run-dir", str(f), threads=2) for f in folders]
    for process in running:
        out, _ = process.communicate()
        assert process.returncode == 0, out
    models = [(folder / f"checkpoints/step-{STEPS}/model.safetensors").read_bytes() for folder in folders]
    assert len({hashlib.sha256(model).hexdigest() for model in models}) == 1
    replays = [mrl("replay", str(folder), "--step", str(STEPS), threads=1) for folder in folders[:2]]
    for process in replays:
        out, _ = process.communicate()
        assert process.returncode == 0, out
