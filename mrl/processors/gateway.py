"""A policy as chat completions for agents elsewhere, each conversation told by the id in its address.

    POST …/rollout_id/ID/…/chat/completions    answered by the policy; what was asked and said is kept under ID. With
                                               `stream` the answer comes as events, once it is whole
    POST …/logs                                 {"tags": ["rollout_id:ID"], "status": {"code": …}}: how it ended
    GET  …/status?rollout_id=ID                 that, for whoever asks

With a policy's tokens they are kept as they were sampled: a request that goes on from the last answer continues its
sequence, any other begins a new one (mrl.rollouts.conversation).
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from mrl.errors import MRLError
from mrl.evaltests.messages import Message as Said
from mrl.processors.streaming import events
from mrl.rollouts import MessagePolicy, PolicyClient, SourceSetup
from mrl.rollouts.base import Reply
from mrl.rollouts.chat import AssistantTurn, ToolSpec
from mrl.rollouts.conversation import Conversation
from mrl.rollouts.endpoint import wire_message
from mrl.server.serving import Serving
from mrl.types import GenerateRequest, Message, Sample, SamplingParams, derive_seed

if TYPE_CHECKING:
    from fastapi import FastAPI

TOKEN = "MRL_GATEWAY_TOKEN"
"""The environment variable with the key that requests from other machines have to bring."""
MODEL = "policy"
"""What the policy is called there."""
_ID = re.compile(r"rollout_id[/:]([\w.-]+)")


@dataclass
class Traced:
    """One rollout, as it was seen from here."""

    policy: PolicyClient | MessagePolicy
    setup: SourceSetup
    seed: int
    messages: list[Message] = field(default_factory=list)
    """The longest conversation so far."""
    tools: list[ToolSpec] = field(default_factory=list)
    status: dict[str, Any] | None = None
    extras: dict[str, Any] = field(default_factory=dict)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    talk: Conversation | None = None
    turns: int = 0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def samples(self) -> list[Sample]:
        """What the policy sampled for it."""
        return [] if self.talk is None else self.talk.samples


class Gateway:
    """address: `host:port` to listen at; port 0 = any that is free. Raises ConfigError."""

    def __init__(self, address: str = "127.0.0.1:0") -> None:
        self.serving = Serving(address, TOKEN)
        self.traced: dict[str, Traced] = {}
        self._started: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Where it is."""
        return self.serving.url

    async def start(self) -> None:
        """Returns when it answers."""
        if self._started is None:
            self._started = asyncio.create_task(self.serving.start(self._app()))
        await asyncio.shield(self._started)

    async def stop(self) -> None:
        """Answer nothing any more."""
        await self.serving.stop()

    def open(self, name: str, policy: PolicyClient | MessagePolicy, setup: SourceSetup, seed: int) -> Traced:
        """Expect a rollout."""
        self.traced[name] = Traced(policy, setup, seed)
        return self.traced[name]

    def close(self, name: str) -> None:
        """Forget it."""
        self.traced.pop(name, None)

    # --- inner ------------------------------------------------------------------------------------------------------

    def _app(self) -> FastAPI:
        from fastapi import FastAPI, Request
        from fastapi.responses import JSONResponse, StreamingResponse

        app = FastAPI()

        @app.middleware("http")
        async def only_who_may(request: Request, call_next: Any) -> Any:
            if self.serving.token and request.headers.get("authorization") != f"Bearer {self.serving.token}":
                return JSONResponse({"error": {"message": f"the key of {TOKEN} is needed"}}, 401)
            return await call_next(request)

        async def posted(request: Request) -> Any:
            path = request.url.path.rstrip("/")
            try:
                body = await request.json()
            except ValueError:
                body = None
            if not isinstance(body, dict):
                return JSONResponse({"error": {"message": "the body is no JSON object"}}, 400)
            if path.endswith("/logs"):
                return JSONResponse(self._log(body))
            if not path.endswith("/chat/completions"):
                said = f"there is no {path}; there are chat/completions and logs"
                return JSONResponse({"error": {"message": said}}, 404)
            found = _ID.search(path)
            traced = self.traced.get(found[1]) if found else None
            if traced is None:
                return JSONResponse({"error": {"message": f"nobody waits for a rollout of {path}"}}, 404)
            try:
                completion = await self._complete(traced, found[1] if found else "", body)
            except (MRLError, ValueError) as error:
                return JSONResponse({"error": {"message": str(error)}}, 400)
            if not body.get("stream"):
                return JSONResponse(completion)
            usage = bool((body.get("stream_options") or {}).get("include_usage"))
            return StreamingResponse(events(completion, usage=usage), media_type="text/event-stream")

        async def asked(request: Request) -> Any:
            if not request.url.path.rstrip("/").endswith("/status"):
                return JSONResponse({"error": {"message": "there is status?rollout_id=ID"}}, 404)
            name = request.query_params.get("rollout_id", "")
            traced = self.traced.get(name)
            if traced is None:
                return JSONResponse({"error": {"message": f"nobody waits for {name!r}"}}, 404)
            return JSONResponse({"rollout_id": name, "status": traced.status, "extras": traced.extras})

        app.add_route("/{path:path}", posted, methods=["POST"])
        app.add_route("/{path:path}", asked, methods=["GET"])
        return app

    def _log(self, body: dict[str, Any]) -> dict[str, Any]:
        tags = body.get("tags") or []
        for tag in tags:
            kind, _, name = str(tag).partition(":")
            traced = self.traced.get(name) if kind == "rollout_id" else None
            if traced is not None and isinstance(body.get("status"), dict):
                traced.status = body["status"]
                traced.extras |= body.get("extras") or {}
        return {"taken": True}

    async def _complete(self, traced: Traced, name: str, body: dict[str, Any]) -> dict[str, Any]:
        if body.get("n") not in (None, 1):
            raise ValueError(f"n: {body['n']} answers to one request would be several rollouts; ask for one at a time")
        messages = [Said.model_validate(message).plain() for message in body.get("messages") or []]
        if not messages:
            raise ValueError("messages: there are none")
        tools: list[ToolSpec] = list(body.get("tools") or [])
        most = body.get("max_completion_tokens") or body.get("max_tokens")
        async with traced.turn:
            reply = await self._reply(traced, name, messages, tools, None if most is None else int(most))
        traced.prompt_tokens += reply.prompt_tokens
        traced.completion_tokens += reply.completion_tokens
        if len(messages) + 1 >= len(traced.messages):
            traced.messages, traced.tools = [*messages, reply.turn.message], tools
        calls = bool(reply.turn.tool_calls)
        reason = "length" if reply.finish_reason == "length" else "tool_calls" if calls else "stop"
        usage = {"prompt_tokens": reply.prompt_tokens, "completion_tokens": reply.completion_tokens}
        return {
            "id": f"{name}/{traced.turns}",
            "object": "chat.completion",
            "created": 0,
            "model": body.get("model") or MODEL,
            "choices": [{"index": 0, "message": wire_message(reply.turn.message), "finish_reason": reason}],
            "usage": usage | {"total_tokens": sum(usage.values())},
        }

    async def _reply(
        self, traced: Traced, name: str, messages: list[Message], tools: list[ToolSpec], most: int | None
    ) -> Reply:
        """The policy's answer, sampled as the run samples; the request may only make it shorter."""
        setup, seed = traced.setup, derive_seed(traced.seed, traced.turns)
        own = setup.limits.turn_tokens or setup.sampling.max_tokens
        sampling: SamplingParams = replace(setup.sampling, max_tokens=min(own, most or own))
        traced.turns += 1
        if isinstance(traced.policy, MessagePolicy):
            return await traced.policy.reply(messages, tools, sampling, seed)
        chat = setup.chat()
        talk = traced.talk
        if talk is None:
            talk = traced.talk = Conversation(chat, messages, tools, setup.encoder.images)
        elif (new := _after(talk.messages, messages)) and tools == talk.tools:
            talk.add(*new)
        else:
            talk.replace(messages)
            talk.tools = tools
        prompt = talk.next_prompt()
        room = traced.policy.max_model_len - len(prompt)
        if room < 1:
            raise ValueError(f"the conversation has {len(prompt)} tokens, and {traced.policy.max_model_len} fit")
        stops = tuple(sorted({*sampling.stop_token_ids, *chat.stop_token_ids}))
        sampling = replace(sampling, max_tokens=min(sampling.max_tokens, room), stop_token_ids=stops)
        request = GenerateRequest(
            f"{name}/{traced.turns}", prompt, sampling, seed, session=name, media=talk.next_media()
        )
        completion = await traced.policy.generate(request)
        if completion.error is not None or not completion.token_ids:
            raise ValueError(completion.error or "the completion has no tokens")
        turn: AssistantTurn = talk.add_completion(completion)
        return Reply(turn, completion.finish_reason, len(prompt), len(completion.token_ids))


def _after(known: list[Message], messages: list[Message]) -> list[Message]:
    """What comes after a conversation that is known; [] where it is another one, or says nothing new."""
    start = messages[: len(known)]
    if len(messages) <= len(known) or any(_said(a) != _said(b) for a, b in zip(known, start, strict=True)):
        return []
    new = messages[len(known) :]
    return [] if any(message["role"] == "assistant" for message in new) else new


def _said(message: Message) -> Any:
    calls = [(c["function"]["name"], c["function"].get("arguments")) for c in message.get("tool_calls") or []]
    return message["role"], message.get("content") or "", calls, message.get("tool_call_id")
