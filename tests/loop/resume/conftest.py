"""Finished runs to go on with: made once, and a copy for each test."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.small_runs import run


@pytest.fixture(scope="session")
def finished_runs(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the runs `1` and `4`, which have so many steps and a checkpoint of each."""
    folder = tmp_path_factory.mktemp("finished")
    for steps in (1, 4):
        run(tiny_model, folder / str(steps), max_steps=steps)
    return folder


@pytest.fixture
def one_step(finished_runs: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished_runs / "1", tmp_path / "r"))


@pytest.fixture
def four_steps(finished_runs: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished_runs / "4", tmp_path / "r"))
