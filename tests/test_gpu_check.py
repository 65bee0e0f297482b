"""The script for people with a GPU, on the CPU: what can run here does, and what goes wrong is told."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).parent.parent / "scripts" / "gpu_check.py"
spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
assert spec is not None
assert spec.loader is not None
gpu_check: Any = importlib.util.module_from_spec(spec)
sys.modules["gpu_check"] = gpu_check
spec.loader.exec_module(gpu_check)

ON_CPU = [name for name in gpu_check.PARTS if name not in ("train_offload", "train_liger", "vllm", "colocate")]
TRIED_ELSEWHERE = ("train_compiled",)
"""Compiling takes a minute."""


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, timeout=900)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done = run("--out", str(tmp_path / "report.json"))
    assert done.returncode == 2
    assert "torch sees no GPU here" in done.stderr
    assert not (tmp_path / "report.json").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_on_a_cpu_what_can_run_is_right(tmp_path: Path) -> None:
    parts = [name for name in gpu_check.PARTS if name not in TRIED_ELSEWHERE]
    done = run("--device", "cpu", "--out", str(tmp_path / "report.json"), "--parts", *parts)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    outcomes = {name: part["outcome"] for name, part in report["parts"].items()}
    assert {name for name in outcomes if outcomes[name] == "right"} >= set(ON_CPU) - {*TRIED_ELSEWHERE, "trl"}
    assert set(outcomes.values()) <= {"right", "skipped"}
    checked = [check["what"] for part in report["parts"].values() for check in part["checks"]]
    assert len(checked) > 20
    assert report["parts"]["train_full"]["facts"]["nats per token that the updates moved"] > 0.01
    for name in parts:
        assert f"\n{name}: " in done.stdout


def test_a_part_that_fails_dies_or_hangs_is_named_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = {
        "machine": 'print(\'noise\'); print(\'{"outcome": "right", "facts": {"gpu": "none"}, "checks": []}\')',
        "logprobs": "import os; os.abort()",
        "decode": "import time; time.sleep(60)",
        "trl": 'print(\'{"outcome": "skipped", "error": "needs trl", "checks": []}\')',
    }
    plain = subprocess.run

    def instead(command: list[str], **options: Any) -> Any:
        return plain([sys.executable, "-c", answers[command[command.index("--child") + 1]]], **options)

    monkeypatch.setattr(gpu_check, "SECONDS", 5.0)
    monkeypatch.setattr(gpu_check.subprocess, "run", instead)
    out = tmp_path / "report.json"
    monkeypatch.setattr(sys, "argv", ["x", "--device", "cpu", "--out", str(out), "--parts", *answers])
    assert gpu_check.main() == 1
    found = json.loads(out.read_text())["parts"]
    outcomes = ["right", "died", "hangs", "skipped"]
    assert [part["outcome"] for part in found.values()] == outcomes
    printed = capsys.readouterr().out
    assert "2 of 4 parts are as they should be" in printed
    assert "Not: logprobs, decode" in printed


def test_wrong_numbers_errors_and_graphs_that_were_not_captured_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(report: Any) -> None:
        """Finds no number."""
        report.at_most("apart", float("nan"), 1.0)

    def broken(report: Any) -> None:
        """Fails."""
        raise RuntimeError("no kernel image")

    def skips(report: Any) -> None:
        """Cannot."""
        raise gpu_check.Skip("not here")

    def right(report: Any) -> None:
        """Finds what it should."""
        report.at_most("apart", 0.5, 1.0)
        report.at_least("shared", 0.5, 0.1)

    def warns(report: Any) -> None:
        """Takes another way than it was to try."""
        text = "decode_step: Llama could not be recorded as a CUDA graph, eager steps are taken"
        warnings.warn_explicit(text, UserWarning, "/site-packages/mrl/engines/transformers/engine.py", 1)

    for part, outcome in ((warns, "wrong"), (wrong, "wrong"), (broken, "failed"), (skips, "skipped"), (right, "right")):
        monkeypatch.setitem(gpu_check.PARTS, "machine", part)
        found = gpu_check.tried("machine", "cpu")
        assert found["outcome"] == outcome
        json.dumps(found)
        assert gpu_check.lines_of("machine", found | {"seconds": 1.0})
    monkeypatch.setitem(gpu_check.PARTS, "machine", broken)
    assert "no kernel image" in gpu_check.tried("machine", "cpu")["error"]
