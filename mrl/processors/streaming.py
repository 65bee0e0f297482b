"""A chat completion as a stream of server-sent events, for clients that ask for one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any


def events(completion: dict[str, Any], *, usage: bool) -> Iterator[str]:
    """`chat.completion.chunk`s: who speaks, what was thought, what is said, each call, why it ended. usage: a last one
    with the tokens (`stream_options: {"include_usage": true}`)."""
    shared = {name: completion[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    (choice,) = completion["choices"]
    message = choice["message"]
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{name: message[name]} for name in ("reasoning_content", "content") if message.get(name)]
    deltas += [{"tool_calls": [{"index": index, **call}]} for index, call in enumerate(message.get("tool_calls") or [])]
    for delta in deltas:
        yield _event(shared | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    yield _event(shared | {"choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]})
    if usage:
        yield _event(shared | {"choices": [], "usage": completion["usage"]})
    yield "data: [DONE]\n\n"


def _event(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk)}\n\n"
