"""`mrl logs`, `mrl report` and the page beside a training, as processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from mrl.cli.logs import report
from mrl.errors import ConfigError
from mrl.logs.live import live_page
from tests.logs.conftest import write_run

ROOT = Path(__file__).parents[2]


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "MRL_RUNS": str(folder), "PYTHONPATH": str(ROOT)}


def test_it_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    write_run(tmp_path / "one", steps=1)
    command = [sys.executable, "-m", "mrl", "logs", "--port", "0"]
    process = subprocess.Popen(command, env=environment(tmp_path), stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        link = process.stdout.readline().split()[-1]
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", link)
        assert "/run/one" in httpx.get(link, timeout=20).text
    finally:
        process.send_signal(signal.SIGINT)
    assert process.wait(20) in (0, 130)


def test_a_run_that_is_not_there(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mrl", "logs", "none"]
    done = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True)
    assert done.returncode == 2
    assert "there is no run 'none'" in done.stderr


def test_beside_a_training(tmp_path: Path) -> None:
    """It is there before the run, follows it, and ends with it."""
    with live_page(tmp_path / "later", port=0) as link:
        children = psutil.Process().children()
        page = httpx.get(link.partition("run/")[0], timeout=20)
        assert "later" in page.text
        assert httpx.get(link, timeout=20).status_code == 404
        write_run(tmp_path / "later", steps=2)
        assert httpx.get(link, timeout=20).status_code == 200
    assert not any(child.is_running() and child.status() != "zombie" for child in children if "mrl.logs" in str(child))
    with pytest.raises(httpx.ConnectError):
        httpx.get(link, timeout=20)


def test_it_ends_when_the_run_is_killed(tmp_path: Path) -> None:
    code = """
import sys, time
from pathlib import Path
from mrl.logs.live import live_page
with live_page(Path(sys.argv[1]), port=0) as link:
    print(link, flush=True)
    time.sleep(60)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "killed")]
    process = subprocess.Popen(command, env=environment(tmp_path), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    link = process.stdout.readline().strip()
    (page,) = psutil.Process(process.pid).children()
    assert httpx.get(link.partition("run/")[0], timeout=20).status_code == 200
    process.kill()
    process.wait()
    deadline = time.monotonic() + 20
    while page.is_running() and page.status() != "zombie" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not page.is_running() or page.status() == "zombie"


def test_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "one")
    monkeypatch.setenv("MRL_RUNS", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert report(["one"]) == 0
    assert capsys.readouterr().out.startswith("one.html (")
    text = (tmp_path / "one.html").read_text()
    for expected in ("Reward by function", "Highest rewards of step 12", "SandboxError: it broke", "learning_rate"):
        assert expected in text
    assert not re.search(r'(src|href)="(http|//)', text)
    with pytest.raises(ConfigError, match=r"--output: one.html exists"):
        report(["one"])
    with pytest.raises(ConfigError, match="cannot be written"):
        report(["one", "--output", "no/such/folder.html"])
