"""A server on loopback that speaks OpenAI's chat completions, and goes wrong in the ways that such servers do.

Unless a test says what to answer, it likes long answers: a text's score is its length, at most 10.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

Respond = Callable[[dict[str, Any], int], Any]
"""From a request's body, and how many came before it, to an answer's text, a response, or seconds to wait."""
USAGE = {"prompt_tokens": 30, "completion_tokens": 7}


@dataclass
class JudgeServer:
    """What came, and what is answered."""

    url: str = ""
    respond: Respond = lambda body, number: likes_length(body)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0

    def reset(self) -> None:
        self.respond = lambda body, number: likes_length(body)
        self.bodies, self.keys, self.at_once, self.most_at_once = [], [], 0, 0

    def options(self, **changes: Any) -> dict[str, Any]:
        """Of a judge that asks it."""
        return {"model": "m", "base_url": self.url, "rubric": "Longer is better.", **changes}


def likes_length(body: dict[str, Any]) -> str:
    """In the form that the schema asks for, by what is between the tags."""
    shown = texts_shown(body)
    schema = body["response_format"]["json_schema"]["schema"]["properties"]
    scores = {label: min(len(text), 10) for label, text in shown.items()}
    if "score" in schema:
        return json.dumps({"reason": "its length", "score": next(iter(scores.values()))})
    if "scores" in schema:
        names = schema["scores"]["properties"]
        whole = next(iter(scores.values()))
        return json.dumps({"reason": "r", "scores": {name: scores.get(name, whole) for name in names}})
    places = sorted(set(scores.values()), reverse=True)
    return json.dumps({"reason": "r", "order": [[k for k, v in scores.items() if v == place] for place in places]})


def texts_shown(body: dict[str, Any]) -> dict[str, str]:
    """What is to be judged, by label; of a single answer the label is empty."""
    said = body["messages"][1]["content"]
    found = re.findall(r"<answer-(?:([A-Z]+)-)?([0-9a-f]{10})>\n(.*?)\n</answer-(?:\1-)?\2>", said, re.DOTALL)
    return {label: text for label, _, text in found}


def chat(text: str | None, **choice: Any) -> dict[str, Any]:
    """A chat completion."""
    message = {"role": "assistant", "content": text}
    return {"choices": [{"index": 0, "message": message, "finish_reason": "stop", **choice}], "usage": USAGE}


def error(status: int, message: str, headers: dict[str, str] | None = None, code: str | None = None) -> Response:
    """As OpenAI says what went wrong."""
    return JSONResponse({"error": {"message": message, "code": code}}, status, headers)


def serve() -> tuple[JudgeServer, Callable[[], None]]:
    """The server, running, and what ends it."""
    state, app = JudgeServer(), FastAPI()

    @app.post("/v1/chat/completions")
    async def complete(request: Request) -> Any:
        body, number = json.loads(await request.body()), len(state.bodies)
        state.bodies.append(body)
        state.keys.append(request.headers.get("authorization"))
        state.at_once += 1
        state.most_at_once = max(state.most_at_once, state.at_once)
        await asyncio.sleep(0.01)
        try:
            answer = state.respond(body, number)
            if isinstance(answer, float):
                await asyncio.sleep(answer)
                answer = likes_length(body)
        finally:
            state.at_once -= 1
        return JSONResponse(chat(answer)) if isinstance(answer, str) else answer

    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    state.url = f"http://127.0.0.1:{port}/v1"

    def end() -> None:
        server.should_exit = server.force_exit = True
        thread.join(timeout=10)

    return state, end
