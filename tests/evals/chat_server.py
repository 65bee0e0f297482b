"""Somebody's chat completions, on loopback."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class ChatServer:
    """says: the assistant's message, or a status to answer with instead, of a request's body. Requests are kept."""

    says: Callable[[dict[str, Any]], Any]
    seconds: float = 0.0
    key: str | None = None
    """What it insists on, where it says which models it has."""
    models: tuple[str, ...] = ("m", "n")
    asked: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""

    @contextmanager
    def running(self) -> Iterator[ChatServer]:
        chat = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                if chat.key is not None and self.headers.get("Authorization") != f"Bearer {chat.key}":
                    self.answer(401, {"error": "no"})
                    return
                self.answer(200, {"data": [{"id": name} for name in chat.models]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                chat.asked.append(body | {"_path": self.path, "_key": self.headers.get("Authorization")})
                time.sleep(chat.seconds)
                said = chat.says(body)
                if isinstance(said, int):
                    self.answer(said, {"error": "no"})
                    return
                message = {"role": "assistant", "content": said} if isinstance(said, str) else said
                choice = {"index": 0, "message": message, "finish_reason": "stop"}
                usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
                self.answer(200, {"choices": [choice], "usage": usage})

            def answer(self, status: int, body: dict[str, Any]) -> None:
                content = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        self.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
