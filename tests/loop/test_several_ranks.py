"""Whole runs whose actor is several processes."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

from mrl.backends.remote import RemoteHandle
from mrl.store.run import read_rows
from tests import small_runs

pytestmark = [pytest.mark.slow, pytest.mark.inline("it is the backend whose ranks are looked at")]


def learned(run: Path) -> list[dict[str, Any]]:
    return [row for row in read_rows(run, "metrics") if "train/loss" in row]


def rank_1() -> int:
    """Its process's number."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it may just end
            if "mrl.backends.rank" in process.cmdline() and process.environ().get("RANK") == "1":
                return process.pid
    raise AssertionError("there is none")


def test_a_run_of_two_is_the_run_of_one_also_when_one_of_them_dies(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"weight_sync_method": "direct", "max_steps": 3}
    small_runs.run(tiny_model, tmp_path / "one", **options)
    call, killed = RemoteHandle.call, []

    async def counted(self: RemoteHandle, method: str, *args: Any, **kwargs: Any) -> Any:
        if (self.name, method) == ("actor-1", "learn"):
            killed.append(method)
            if len(killed) == 2:
                os.kill(rank_1(), signal.SIGKILL)
        return await call(self, method, *args, **kwargs)

    monkeypatch.setattr(RemoteHandle, "call", counted)
    result = small_runs.run(tiny_model, tmp_path / "two", actor_gpu="cpu:2", **options)
    assert (result.status, result.steps) == ("finished", 3)
    (event,) = [row for row in read_rows(tmp_path / "two", "events") if row["kind"] == "restart"]
    assert re.search(r"actor, rank [01] of 2: .* Going on after step \d", event["message"])  # either may notice first
    one, two = learned(tmp_path / "one"), learned(tmp_path / "two")
    for metric in ("train/loss", "train/grad_norm", "train/tokens", "reward/mean"):
        assert [row[metric] for row in two] == pytest.approx([row[metric] for row in one], abs=2e-5), metric
    assert result.checkpoint is not None
    weights = [load_file(tmp_path / name / "checkpoints" / "step-3" / "model.safetensors") for name in ("one", "two")]
    assert all((weights[0][name] - weights[1][name]).abs().max() < 2e-5 for name in weights[0])
    again = small_runs.run(
        tiny_model, tmp_path / "two", **options | {"max_steps": 4, "resume": "auto"}
    )  # in one process
    assert (again.status, again.steps) == ("finished", 4)
    with pytest.raises(AssertionError, match="there is none"):
        rank_1()


def test_the_command_under_torchrun(tmp_path: Path) -> None:
    small = "--max-steps 2 --batch-size 2 --num-generations 4 --max-completion-length 8 --device cpu --report-to jsonl"
    command = f"-m mrl train --model starter --dataset tiny-code --run-dir {tmp_path}/run {small}"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", *command.split()]
    ended = subprocess.run(torchrun, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("finished after 2 steps") + ended.stdout.count("finished after 2 steps") == 1
    assert len(list(read_rows(tmp_path / "run", "metrics"))) == 2
