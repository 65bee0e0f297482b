"""The address that agents ask: whole answers, and as streams."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from mrl.processors.gateway import Gateway
from mrl.rollouts import TurnLimits
from mrl.rollouts.base import Reply
from mrl.rollouts.chat import AssistantTurn, ToolCall
from mrl.rollouts.endpoint import UNBOUNDED, endpoint_setup
from mrl.types import SamplingParams


class Policy:
    """Says the last message backwards; calls a tool where it is shown one."""

    max_model_len = UNBOUNDED

    async def reply(self, messages: list[Any], tools: list[Any], sampling: SamplingParams, seed: int) -> Reply:
        call = ToolCall("c1", "search", {"query": "ü"})
        turn = AssistantTurn(messages[-1]["content"][::-1], "hm", (call,) if tools else (), ())
        return Reply(turn, "stop", 7, 3, None)


@pytest.fixture
async def asked() -> AsyncIterator[httpx.AsyncClient]:
    gateway = Gateway()
    await gateway.start()
    gateway.open("r1", Policy(), endpoint_setup(SamplingParams(), TurnLimits()), 0)
    async with httpx.AsyncClient(base_url=f"{gateway.url}/rollout_id/r1") as client:
        yield client
    await gateway.stop()


def body(**more: Any) -> dict[str, Any]:
    return {"model": "policy", "messages": [{"role": "user", "content": "abc"}], **more}


async def streamed(client: httpx.AsyncClient, **more: Any) -> list[dict[str, Any]]:
    async with client.stream("POST", "/chat/completions", json=body(stream=True, **more)) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line async for line in answer.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    return chunks


TOOL = {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}


async def test_a_stream_says_what_a_whole_answer_says(asked: httpx.AsyncClient) -> None:
    whole = (await asked.post("/chat/completions", json=body(tools=[TOOL]))).json()["choices"][0]
    chunks = await streamed(asked, tools=[TOOL])
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant"
    assert "".join(delta.get("content") or "" for delta in deltas) == whole["message"]["content"] == "cba"
    (call,) = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert call.pop("index") == 0
    assert [call] == whole["message"]["tool_calls"]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert (
        reasons == [None] * (len(chunks) - 1) + ["tool_calls"] == [None] * (len(chunks) - 1) + [whole["finish_reason"]]
    )


async def test_tokens_come_last_where_they_are_asked_for(asked: httpx.AsyncClient) -> None:
    assert all("usage" not in chunk for chunk in await streamed(asked))
    *before, last = await streamed(asked, stream_options={"include_usage": True})
    assert all(chunk["choices"] for chunk in before)
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}


async def test_what_is_not_answered_is_no_stream(asked: httpx.AsyncClient) -> None:
    several = await asked.post("/chat/completions", json=body(stream=True, n=2))
    assert several.status_code == 400
    assert "ask for one at a time" in several.json()["error"]["message"]
    empty = await asked.post("/chat/completions", json={"messages": [], "stream": True})
    assert (empty.status_code, empty.json()["error"]["message"]) == (400, "messages: there are none")
    broken = await asked.post("/chat/completions", content=b"{")
    assert (broken.status_code, broken.json()["error"]["message"]) == (400, "the body is no JSON object")
    other = await asked.post(str(asked.base_url).replace("r1", "r2") + "chat/completions", json=body())
    assert other.status_code == 404
