"""A Ray cluster of two nodes that have no disk in common and lose each other."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.backends.two_networks import can_have, networks


@pytest.mark.ray
@pytest.mark.parametrize("apart", [can_have()], ids=["networks of their own" if can_have() else "processes that stop"])
def test_a_node_that_falls_silent_and_comes_back(apart: bool) -> None:
    """By a cable that is cut and healed, where namespaces can be made, else by stopping all its processes."""
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "tests.backends.ray_nodes"]
    with networks() if apart else contextlib.nullcontext() as made:
        if made is not None:
            command = [*made.within(0), *command, *made.names]
            environment["RAY_AUTH_MODE"] = "disabled"  # the nodes are started one by one
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("done\n")
