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

from mrl.engines.transformers.model import CausalLM
from mrl.engines.transformers.static_step import StaticStep
from tests.engines.transformers.test_static_step import Traces

SCRIPT = Path(__file__).parent.parent / "scripts" / "gpu_check.py"
spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
assert spec is not None
assert spec.loader is not None
gpu_check: Any = importlib.util.module_from_spec(spec)
sys.modules["gpu_check"] = gpu_check
spec.loader.exec_module(gpu_check)

NEED_MORE = ("train_offload", "train_liger", "waits", "vllm", "colocate")
ON_CPU = [name for name in gpu_check.PARTS if name not in NEED_MORE]
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
    told = {name for name, part in report["parts"].items() if "not shown on a CPU" in part["facts"]}
    assert told == {"products", "graphs", "micro_batches"}
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


def test_waits_are_counted_by_line_and_other_warnings_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own warnings are made here, there being no GPU to make it warn."""
    mode: list[str | int] = [0]

    def set_mode(to: str | int) -> None:
        mode.append(to)
        warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: mode[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    with warnings.catch_warnings(record=True) as kept:
        warnings.simplefilter("always")
        with gpu_check.host_waits() as found:
            assert mode[-1] == "warn"
            for _ in range(3):
                warnings.warn_explicit("called a synchronizing CUDA operation (Triggered …)", UserWarning, "/a/b.py", 7)
            warnings.warn_explicit("something else", UserWarning, "/a/c.py", 8)
    assert mode[-1] == 0
    assert found == {"b.py:7": 3}
    assert [str(one.message) for one in kept] == ["something else"]


@pytest.mark.parametrize("kept", [True, False])
def test_graphs_that_are_not_kept_through_new_weights_are_told(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With traces in the place of CUDA graphs."""
    traces, clear = Traces(), StaticStep.clear

    def forget(step: StaticStep) -> None:
        step.recorded = {}
        clear(step)

    monkeypatch.setattr(CausalLM, "new_recorder", lambda self: traces)
    monkeypatch.setattr(gpu_check.Report, "gpu", True)
    if not kept:
        monkeypatch.setattr(StaticStep, "clear", forget)
    report = gpu_check.Report("cpu")
    gpu_check.graphs(report)
    wrong = [check["what"] for check in report.checks if not check["ok"]]
    what = "of them still there after new weights"
    assert wrong == ([] if kept else [f"float32: {what}", f"bfloat16: {what}"])


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
