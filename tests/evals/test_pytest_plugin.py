"""`pytest my_eval.py` and `mrl eval my_eval.py`, each in a process of its own, against an endpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.evals.chat_server import ChatServer

PLUGIN = "mrl.evals.pytest_plugin"
ROOT = Path(__file__).parents[2]
MODULE = """
from mrl.evals import EvaluateResult, EvaluationRow, Message, evaluation_test

rows = [EvaluationRow(messages=[Message(role="user", content=text)]) for text in ("ab", "cd")]

def scored(row: EvaluationRow) -> EvaluationRow:
    asked, said = row.messages[0].text, row.messages[-1].text
    row.evaluation_result = EvaluateResult(score=float(said == asked[::-1]))
    return row

@evaluation_test(input_rows=[rows], completion_params=[{"model": "m"}], passed_threshold=0.5)
def backwards(row: EvaluationRow) -> EvaluationRow:
    return scored(row)

@evaluation_test(input_rows=[rows], completion_params=[{"model": "m"}], passed_threshold=0.75)
def strictly(row: EvaluationRow) -> EvaluationRow:
    return scored(row)

def test_beside_it() -> None:
    assert True
"""


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with ChatServer(lambda body: {"ab": "ba"}.get(body["messages"][-1]["content"], "?")).running() as running:
        yield running


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    path = {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", *words], cwd=folder, env=os.environ | path, capture_output=True, text=True, timeout=120
    )


def pytest_on(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    plain = ("-p", "no:cacheprovider", "-p", "no:xdist", "-q")
    installed = any(one.value == PLUGIN for one in entry_points(group="pytest11"))  # an older one may be
    return run(folder, "pytest", *([] if installed else ["-p", PLUGIN]), *plain, *words)


def test_a_file_of_any_name_passes_or_fails_by_its_threshold(tmp_path: Path, server: ChatServer) -> None:
    (tmp_path / "my_eval.py").write_text(MODULE, encoding="utf-8")
    done = pytest_on(tmp_path, "my_eval.py", "--mrl-model", server.url)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 2 passed" in done.stdout
    assert "score (mean)" in done.stdout
    assert "threshold 0.5: passed" in done.stdout
    assert "the score 0.500 is below the threshold 0.75" in done.stdout
    assert "Traceback" not in done.stdout
    for name in ("backwards", "strictly"):
        assert len(list((tmp_path / "runs").glob(f"eval-{name}-*/rows.jsonl"))) == 1


@pytest.mark.slow
def test_mrl_eval_does_the_same(tmp_path: Path, server: ChatServer) -> None:
    (tmp_path / "my_eval.py").write_text(MODULE, encoding="utf-8")
    flags = ["--model", server.url, "--json", "--output", "rows.jsonl"]
    done = run(tmp_path, "mrl", "eval", "my_eval.py", *flags)
    assert done.returncode == 1, done.stdout + done.stderr
    assert [(report["score"], report["passed"]) for report in json.loads(done.stdout)] == [(0.5, True), (0.5, False)]
    assert len((tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()) == 4
    wrong = run(tmp_path, "mrl", "eval", "my_eval.py:forwards", "--model", server.url)
    assert wrong.returncode == 2
    assert "error: my_eval.py has no test 'forwards'; it has backwards, strictly" in wrong.stderr
    missing = run(tmp_path, "mrl", "eval", "their_eval.py", "--model", server.url)
    assert f"error: there is no file {tmp_path / 'their_eval.py'}" in missing.stderr
    quiet = pytest_on(tmp_path, "my_eval.py::backwards", "--mrl-model", server.url, "--mrl-no-record")
    assert quiet.returncode == 0, quiet.stdout + quiet.stderr
    assert len(list((tmp_path / "runs").glob("eval-*"))) == 2


def test_other_runs_of_pytest_pay_nothing(tmp_path: Path) -> None:
    (tmp_path / "test_other.py").write_text(
        "import sys\ndef test_it():\n    assert not {'torch', 'pydantic', 'mrl.evaltests'} & set(sys.modules)\n",
        encoding="utf-8",
    )
    done = pytest_on(tmp_path, "test_other.py")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_plugin_is_an_entry_point() -> None:
    assert 'mrl = "mrl.evals.pytest_plugin"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
