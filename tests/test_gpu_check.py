"""The script for people with a GPU, on the CPU: what can run here does, and what goes wrong is told."""

from __future__ import annotations

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

SCRIPTS = Path(__file__).parent.parent / "scripts"
sys.path.append(str(SCRIPTS))

import gpu_check  # noqa: E402
from gpu_checks.measuring import host_waits  # noqa: E402
from gpu_checks.report import Report, Skip, lines_of, tried  # noqa: E402

NEED_MORE = ("train_offload", "train_liger", "waits", "vllm", "colocate", "trl")
"""A GPU, or packages that need not be installed."""
TRIED_ELSEWHERE = ("train_compiled",)
"""Compiling takes a minute."""
NOT_SHOWN = ("products", "graphs", "micro_batches")
"""They tell what they could find out on a GPU only."""


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / "gpu_check.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, timeout=900)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done = run("--out", str(tmp_path / "report.json"))
    assert done.returncode == 2
    assert "torch sees no GPU here" in done.stderr
    assert not (tmp_path / "report.json").exists()


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("scratch"))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in gpu_check.PARTS if name not in TRIED_ELSEWHERE])
def test_on_a_cpu_what_can_run_is_right(name: str, scratch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_CHECK_SCRATCH", scratch)
    found = tried(gpu_check.part(name), "cpu")
    may = {"right", "skipped"} if name in NEED_MORE else {"right"}
    assert found["outcome"] in may, "\n".join(lines_of(name, found | {"seconds": 0.0}))
    assert ("not shown on a CPU" in found["facts"]) == (name in NOT_SHOWN)
    if found["outcome"] == "right" and name not in ("machine", "micro_batches", "trl"):
        assert found["checks"]
    if name == "train_full":
        assert found["facts"]["nats per token that the updates moved"] > 0.01


@pytest.mark.slow
def test_a_part_runs_in_a_process_of_its_own_and_is_told_and_written_down(tmp_path: Path) -> None:
    done = run("--device", "cpu", "--out", str(tmp_path / "report.json"), "--parts", "machine")
    assert done.returncode == 0, done.stdout + done.stderr
    part = json.loads((tmp_path / "report.json").read_text())["parts"]["machine"]
    assert (part["outcome"], part["facts"]["torch"]) == ("right", torch.__version__)
    assert "\nmachine: RIGHT (" in done.stdout
    assert f"\n    torch: {torch.__version__}\n" in done.stdout


@pytest.mark.slow
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
        with host_waits() as found:
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
    monkeypatch.setattr(Report, "gpu", True)
    if not kept:
        monkeypatch.setattr(StaticStep, "clear", forget)
    report = Report("cpu")
    gpu_check.part("graphs")(report)
    wrong = [check["what"] for check in report.checks if not check["ok"]]
    what = "of them still there after new weights"
    assert wrong == ([] if kept else [f"float32: {what}", f"bfloat16: {what}"])


def test_wrong_numbers_errors_and_graphs_that_were_not_captured_count() -> None:
    def wrong(report: Any) -> None:
        """Finds no number."""
        report.at_most("apart", float("nan"), 1.0)

    def broken(report: Any) -> None:
        """Fails."""
        raise RuntimeError("no kernel image")

    def skips(report: Any) -> None:
        """Cannot."""
        raise Skip("not here")

    def right(report: Any) -> None:
        """Finds what it should."""
        report.at_most("apart", 0.5, 1.0)
        report.at_least("shared", 0.5, 0.1)

    def warns(report: Any) -> None:
        """Takes another way than it was to try."""
        text = "decode_step: Llama could not be recorded as a CUDA graph, eager steps are taken"
        warnings.warn_explicit(text, UserWarning, "/site-packages/mrl/engines/transformers/engine.py", 1)

    for part, outcome in ((warns, "wrong"), (wrong, "wrong"), (broken, "failed"), (skips, "skipped"), (right, "right")):
        found = tried(part, "cpu")
        assert found["outcome"] == outcome
        json.dumps(found)
        assert lines_of(part.__name__, found | {"seconds": 1.0})
    assert "no kernel image" in tried(broken, "cpu")["error"]
