"""Everything that a GPU does in a run, on a simulated one, in processes of their own: it changes torch as a whole.

The cases are in tests/device; `python -m pytest -n 0 tests/device/cases_actor.py` runs one file of them by itself.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CASES = sorted(path.name for path in (Path(__file__).parent / "device").glob("cases_*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("cases", [CASES[::2], CASES[1::2]], ids=" and ".join)
def test_cases(cases: list[str]) -> None:
    """In two halves: a process takes some seconds before its first case."""
    files = [f"tests/device/{name}" for name in cases]
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider", *files]
    found = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1], timeout=280)
    assert found.returncode == 0, found.stdout[-6000:] + found.stderr[-2000:]
    assert " passed" in found.stdout
