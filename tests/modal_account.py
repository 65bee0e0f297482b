"""An emulator of Modal's control plane, for the real client and its real container entry point."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

EMULATOR = "MRL_MODAL_EMULATOR"


@contextmanager
def account(folder: Path, script: Path | None = None) -> Iterator[dict[str, str]]:
    """The environment variables of an account: this process's own where it has MODAL_SERVER_URL, else that of an
    emulator, which runs meanwhile. MRL_MODAL_EMULATOR is a script that serves one (`--state FOLDER --port-file FILE`);
    script: one that serves more, instead of either. Skips where there is neither."""
    if "MODAL_SERVER_URL" in os.environ and script is None:
        yield {name: value for name, value in os.environ.items() if name.startswith("MODAL_")}
        return
    if EMULATOR not in os.environ:
        pytest.skip(f"neither MODAL_SERVER_URL nor {EMULATOR} is set")
    ports = folder / "ports.json"
    (folder / "state").mkdir()
    options = [] if os.geteuid() == 0 else ["--no-isolate"]
    command = [
        sys.executable,
        str(script or os.environ[EMULATOR]),
        "--state",
        str(folder / "state"),
        "--port-file",
        str(ports),
        *options,
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + 30
            while not (ports.exists() and ports.read_text()):
                assert process.poll() is None, (folder / "log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.1)
            yield {
                "MODAL_SERVER_URL": json.loads(ports.read_text())["url"],
                "MODAL_TOKEN_ID": "ak-local",
                "MODAL_TOKEN_SECRET": "as-local",
                "MODAL_CONFIG_PATH": "/nonexistent.toml",
            }
        finally:
            process.terminate()
            process.wait(timeout=20)
