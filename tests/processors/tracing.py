"""Somebody's tracing gateway: it asks a model of its own, and says afterwards what was said in a rollout."""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.processors.service import post


@dataclass
class Tracing:
    """forgets: it has no traces of anything."""

    forgets: bool = False
    traces: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    statuses: dict[str, dict[str, Any]] = field(default_factory=dict)
    keys: set[str | None] = field(default_factory=set)
    url: str = ""

    def completed(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Asks the model whose address is in the path, and keeps a trace."""
        found = re.search(r"/rollout_id/([^/]+)/.*/encoded_base_url/([^/]+)/chat/completions", path)
        assert found is not None, path
        model = base64.urlsafe_b64decode(found[2]).decode()
        answer: dict[str, Any] = post(f"{model}/chat/completions", body)
        trace = {"input": body["messages"], "output": answer["choices"][0]["message"], "payloads": {"n": 1}}
        self.traces.setdefault(found[1], []).append(trace)
        return answer

    def told(self, path: str, query: dict[str, list[str]]) -> dict[str, Any] | None:
        """What is asked of it afterwards."""
        if path == "/v1/status":
            return {"status": self.statuses.get(query["rollout_id"][0])}
        if path == "/v1/traces/pointwise":
            name = query["tags"][0].removeprefix("rollout_id:")
            traces = [] if self.forgets else self.traces.get(name, [])
            with_payloads = query.get("include_payloads") == ["true"]
            return {"traces": traces if with_payloads else [{**one, "payloads": None} for one in traces]}
        return None

    @contextmanager
    def running(self) -> Iterator[Tracing]:
        tracing = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                tracing.keys.add(self.headers.get("Authorization"))
                if self.path.endswith("/logs"):
                    for tag in body["tags"]:
                        tracing.statuses[tag.removeprefix("rollout_id:")] = body["status"]
                    self.answer(200, {})
                    return
                self.answer(200, tracing.completed(self.path, body))

            def do_GET(self) -> None:
                asked = urlsplit(self.path)
                tracing.keys.add(self.headers.get("Authorization"))
                said = tracing.told(asked.path, parse_qs(asked.query))
                self.answer(200 if said is not None else 404, said or {})

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
