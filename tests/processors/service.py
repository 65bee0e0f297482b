"""Somebody's service that makes rollouts: it asks the model it was told of twice, and says how it ended."""

from __future__ import annotations

import contextlib
import json
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def post(url: str, body: dict[str, Any], key: str | None = None) -> Any:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


@dataclass
class Service:
    """how: `log` tells the gateway that it has ended, `status` says so when it is asked, `fail` ends with an error,
    `idle` asks nobody."""

    how: str = "log"
    inits: list[dict[str, Any]] = field(default_factory=list)
    ended: set[str] = field(default_factory=set)
    url: str = ""

    def begin(self, init: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # whoever asked may be gone
            self.rollout(init)

    def rollout(self, init: dict[str, Any]) -> None:
        name, base = init["metadata"]["rollout_id"], init["model_base_url"]
        messages = list(init["messages"])
        for turn in range(0 if self.how == "idle" else 2):
            body = {"model": init["completion_params"]["model"], "messages": messages, "max_tokens": 6}
            said = post(f"{base}/chat/completions", body, init["api_key"])["choices"][0]["message"]
            messages.append({name: value for name, value in said.items() if value is not None})
            messages.append({"role": "user", "content": f"and {turn}?"})
        if self.how == "status":
            self.ended.add(name)
            return
        status = {"code": 13, "message": "it broke"} if self.how == "fail" else {"code": 100, "message": "Done"}
        gateway = base.split("/rollout_id/")[0]
        post(
            f"{gateway}/logs",
            {"tags": [f"rollout_id:{name}"], "status": status, "extras": {"note": 1}},
            init["api_key"],
        )

    @contextmanager
    def running(self) -> Iterator[Service]:
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                init = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                service.inits.append(init)
                threading.Thread(target=service.begin, args=(init,), daemon=True).start()
                self.answer(200, {})

            def do_GET(self) -> None:
                if service.how != "status":
                    self.answer(404, {})
                    return
                name = self.path.partition("rollout_id=")[2]
                self.answer(200, {"terminated": name in service.ended})

            def answer(self, status: int, body: Any) -> None:
                content = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
