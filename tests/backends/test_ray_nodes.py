"""A Ray cluster of two nodes that have no disk in common and lose each other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.ray
def test_a_node_that_falls_silent_and_comes_back() -> None:
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "tests.backends.ray_nodes"]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("done\n")
