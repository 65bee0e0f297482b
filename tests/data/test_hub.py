"""Datasets of the Hub, played by a server on loopback."""

from __future__ import annotations

import http.server
import io
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import ClassVar

import pytest


class StandInHub(http.server.BaseHTTPRequestHandler):
    """Serves one dataset the way the Hub's HTTP interface does, as far as `datasets` asks."""

    name = "OpenCoder-LLM/opc-sft-stage2"
    sha = "a" * 40
    data: ClassVar[bytes]
    readme = b"---\nconfigs:\n- config_name: educational_instruct\n  data_files: educational_instruct/train-*\n---\n"

    def answer(self) -> None:
        file = "educational_instruct/train-0.parquet"
        if self.path == "/":
            self.reply(200, b"")
        elif self.name not in self.path:
            self.reply(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif self.path.endswith(("README.md", ".parquet")):
            body = self.readme if self.path.endswith(".md") else self.data
            self.reply(200, body, {"X-Repo-Commit": self.sha, "ETag": f'"{len(body)}"'})
        elif "/tree/" in self.path:
            item = {"type": "file", "path": file, "size": len(self.data), "oid": "b" * 40}
            folder = {"type": "directory", "path": "educational_instruct", "oid": "c" * 40}
            self.reply(200, json.dumps([item if "educational_instruct" in self.path else folder]).encode())
        elif self.path.startswith("/api/datasets/"):
            info = {"id": self.name, "sha": self.sha, "siblings": [{"rfilename": "README.md"}, {"rfilename": file}]}
            self.reply(200, json.dumps({**info, "private": False, "gated": False, "tags": []}).encode())
        else:
            self.reply(404, b"{}", {"X-Error-Code": "EntryNotFound"})

    do_GET = do_HEAD = answer

    def reply(self, code: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.mark.slow
def test_hub_datasets(tmp_path: Path) -> None:
    """Downloaded, renamed, unknown, unreachable, and again from the cache with the Hub gone."""
    import datasets

    rows = [{"instruction": "Write f", "output": "o", "testcase": ["assert f(1) == 1"]}]
    buffer = io.BytesIO()
    datasets.Dataset.from_list(rows).to_parquet(buffer)
    StandInHub.data = buffer.getvalue()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), StandInHub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    env = {
        **{k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")},
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path),
        "HF_HUB_DISABLE_XET": "1",
    }
    env.pop("HF_HUB_OFFLINE", None)
    env.pop("HF_HUB_CACHE", None)
    code = """if True:
        import sys
        from mrl.data import load_tasks
        for name, options in [(sys.argv[1], {}), (sys.argv[1], {"split": "test"}), (sys.argv[1], {"config": "nope"}),
                              ("nobody/nothing", {})]:
            try:
                task, = load_tasks(name, **options)
                print(task.prompt, sorted(task.columns), task.columns["testcases"])
            except Exception as error:
                print(type(error).__name__, error)
    """

    def lines() -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", code, StandInHub.name],
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return done.stdout.splitlines()

    loaded, no_split, no_config, unknown = lines()
    assert loaded == "Write f ['output', 'testcases'] ['assert f(1) == 1']"
    assert no_split.startswith("DataError")
    assert "no split 'test' (splits: 'train')" in no_split
    assert "no config 'nope' (configs: 'educational_instruct')" in no_config
    assert "doesn't exist on the Hub" in unknown
    assert "path of a file or folder" in unknown
    server.shutdown()
    server.server_close()
    again, _, _, unreachable = lines()
    assert again == loaded
    assert unreachable.startswith("DataError dataset 'nobody/nothing': cannot reach http://127.0.0.1")
