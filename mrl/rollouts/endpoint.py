"""A policy behind somebody's chat completions: asked with messages, over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import random
import uuid
from dataclasses import dataclass, field
from typing import Any

import httpx

from mrl.errors import ConfigError, EngineError
from mrl.rollouts.base import Reply, SourceSetup, TurnLimits
from mrl.rollouts.chat import AssistantTurn, ChatFormat, ToolCall, ToolSpec
from mrl.rollouts.prompts import PromptEncoder
from mrl.types import FinishReason, Message, SamplingParams

PROVIDERS = {
    "openai": ("https://api.openai.com/v1", "OPENAI_API_KEY"),
    "fireworks_ai": ("https://api.fireworks.ai/inference/v1", "FIREWORKS_API_KEY"),
    "together_ai": ("https://api.together.xyz/v1", "TOGETHERAI_API_KEY"),
    "openrouter": ("https://openrouter.ai/api/v1", "OPENROUTER_API_KEY"),
    "hosted_vllm": (None, None),
}
"""A prefix of a model's name → where it is asked, and the variable with the key; None = wherever `base_url` says."""
ADDRESSES = ("EP_LLM_API_BASE", "EP_LLM_BASE_URL", "OPENAI_BASE_URL")
"""Variables with an address, where nothing else says one."""
OURS = ("model", "base_url", "api_base", "api_key", "system_prompt", "stream", "extra_body", "timeout", "num_retries")
SAMPLED = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "max_completion_tokens", "stop", "seed")
UNBOUNDED = 1 << 22
"""Tokens that an endpoint may be told, as far as is known here."""
AGAIN = (408, 409, 425, 429, 500, 502, 503, 504)
"""Answers after which a request is sent again."""
SECONDS_TO_CHECK = 10.0
FIRST_WAIT = 1.0
"""Seconds before the second try, doubled each time."""
MOST_OF_ANSWER = 300


@dataclass
class Endpoint:
    """Chat completions at an address."""

    model: str
    base_url: str
    api_key: str | None = None
    further: dict[str, Any] = field(default_factory=dict)
    """Fields of every request, by name."""
    given: frozenset[str] = frozenset()
    """Sampling options that are sent; the others are left to the server."""
    timeout: float = 600.0
    """Seconds until an answer."""
    retries: int = 3
    max_model_len: int = UNBOUNDED
    key_from: str = "give api_key in completion_params"
    """What somebody does who has no key, or another."""
    _client: httpx.AsyncClient | None = None

    @classmethod
    def of(cls, params: dict[str, Any]) -> Endpoint:
        """Of completion_params. `provider/model` names a provider; `base_url` (or `api_base`) an address.

        Raises ConfigError where nothing says where to ask.
        """
        named = params.get("model")
        if not isinstance(named, str) or not named:
            raise ConfigError(
                "completion_params: there is no model; give its name, e.g. {'model': 'openai/gpt-4o-mini'}"
            )
        provider, slash, rest = named.partition("/")
        known = provider in PROVIDERS and bool(slash)
        base, variable = PROVIDERS[provider] if known else (None, None)
        address = params.get("base_url") or params.get("api_base")
        address = address or next((os.environ[name] for name in ADDRESSES if os.environ.get(name)), None) or base
        if address is None:
            raise ConfigError(
                f"completion_params: nothing says where {named} is asked; give base_url, e.g. "
                f"http://127.0.0.1:8000/v1, or a provider's name before the model's ({', '.join(PROVIDERS)})"
            )
        variable = variable or "OPENAI_API_KEY"
        key = params.get("api_key") or os.environ.get(variable)
        extra = dict(params.get("extra_body") or {})
        if params.get("stream"):
            raise ConfigError("completion_params: stream: whole answers are taken; leave it out")
        further = {name: value for name, value in params.items() if name not in (*OURS, *SAMPLED)}
        if "reasoning_effort" in extra:
            further["reasoning_effort"] = extra.pop("reasoning_effort")
        return cls(
            rest if known else named,
            str(address).rstrip("/"),
            key,
            {name: value for name, value in (further | extra).items() if value is not None},
            frozenset(name for name in SAMPLED if params.get(name) is not None),
            float(params.get("timeout") or 600.0),
            int(params.get("num_retries") or 3),
            key_from=f"put one into the environment variable {variable}, or api_key into completion_params",
        )

    async def reply(self, messages: list[Message], tools: list[ToolSpec], sampling: SamplingParams, seed: int) -> Reply:
        """Its next turn. Raises EngineError, which says what the server said."""
        body: dict[str, Any] = {"model": self.model, "messages": [wire_message(message) for message in messages]}
        if tools:
            body["tools"] = tools
        values = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "max_tokens": sampling.max_tokens,
            "stop": list(sampling.stop),
            "seed": seed % 2**31,
        }
        most = "max_completion_tokens" if "max_completion_tokens" in self.given else "max_tokens"
        body |= {name: values[name] for name in self.given if name in values}
        if most in self.given:
            body[most] = sampling.max_tokens
        return read_reply(await self._post(body | self.further))

    async def check(self) -> None:
        """Whether somebody answers, who lets us in; no more is asked. Raises ConfigError."""
        url = f"{self.base_url}/models"
        try:
            answer = await self._connected().get(url, timeout=SECONDS_TO_CHECK)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise ConfigError(
                f"nothing answers at {self.base_url} ({type(error).__name__}: {error}), where {self.model} is to be "
                "asked; start it, or give another address (--model, or base_url in completion_params)"
            ) from None
        except httpx.HTTPError:
            return  # slow, or of few words; its chat completions may do
        if answer.status_code == 401:
            said = "refuses the key" if self.api_key else "needs a key"
            raise ConfigError(f"{self.base_url} {said}: {self.key_from}")

    async def close(self) -> None:
        """End its connections."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        url, said = f"{self.base_url}/chat/completions", ""
        for attempt in range(self.retries):
            if attempt:
                await asyncio.sleep(FIRST_WAIT * 2 ** (attempt - 1) * random.uniform(0.75, 1.25))
            try:
                answer = await self._connected().post(url, json=body)
            except httpx.HTTPError as error:
                said = f"{type(error).__name__}: {error}".rstrip(": ")
                continue
            if answer.status_code in AGAIN:
                said = f"HTTP {answer.status_code}: {answer.text[:MOST_OF_ANSWER]}"
                continue
            if answer.is_error:
                raise EngineError(
                    f"{url} refused the request (HTTP {answer.status_code}): {answer.text[:MOST_OF_ANSWER]}"
                )
            try:
                found: dict[str, Any] = answer.json()
            except json.JSONDecodeError:
                raise EngineError(f"{url} answered no JSON: {answer.text[:MOST_OF_ANSWER]}") from None
            return found
        raise EngineError(f"{url} gave no answer in {self.retries} tries; the last said {said}")

    def _connected(self) -> httpx.AsyncClient:
        if self._client is None:
            headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
            self._client = httpx.AsyncClient(headers=headers, timeout=self.timeout, limits=limits)
        return self._client


def wire_message(message: Message) -> dict[str, Any]:
    """As chat completions take it: arguments of calls are JSON text, and what was thought is left out."""
    sent = {name: value for name, value in message.items() if name != "reasoning_content"}
    if calls := sent.get("tool_calls"):
        sent["tool_calls"] = [
            {
                "id": call.get("id") or f"call_{uuid.uuid4().hex[:12]}",
                "type": "function",
                "function": {
                    "name": call["function"]["name"],
                    "arguments": _text(call["function"].get("arguments", {})),
                },
            }
            for call in calls
        ]
    return sent


def read_reply(answer: dict[str, Any]) -> Reply:
    """Of a chat completion. Raises EngineError for what is none."""
    try:
        choice = answer["choices"][0]
        message = choice["message"]
    except (KeyError, IndexError, TypeError):
        raise EngineError(f"no chat completion: {json.dumps(answer, default=str)[:MOST_OF_ANSWER]}") from None
    calls, malformed = [], []
    for call in message.get("tool_calls") or []:
        function = call.get("function") or {}
        try:
            arguments = json.loads(function.get("arguments") or "{}")
        except (TypeError, ValueError):
            arguments = None
        if not isinstance(arguments, dict):
            malformed.append(_text(function))
            continue
        name = str(function.get("name"))
        calls.append(ToolCall(call.get("id") or f"call_{uuid.uuid4().hex[:12]}", name, arguments))
    thought = message.get("reasoning_content") or message.get("reasoning")
    turn = AssistantTurn(
        str(message.get("content") or ""),
        thought if isinstance(thought, str) else None,
        tuple(calls),
        tuple(malformed),
    )
    usage = answer.get("usage") or {}
    reason: FinishReason = "length" if choice.get("finish_reason") == "length" else "stop"
    return Reply(
        turn,
        reason,
        int(usage.get("prompt_tokens") or 0),
        int(usage.get("completion_tokens") or 0),
        choice.get("logprobs"),
    )


def endpoint_setup(sampling: SamplingParams, limits: TurnLimits, system_prompt: str | None = None) -> SourceSetup:
    """What sources are made from where the policy is an endpoint, which writes conversations itself."""
    return MessageSetup(None, MessageEncoder(system_prompt), sampling, limits)  # type: ignore[arg-type]


class MessageSetup(SourceSetup):
    """Without a tokenizer."""

    def chat(self) -> ChatFormat:
        return _Served()


class MessageEncoder(PromptEncoder):
    """Messages as they are: their tokens are the endpoint's business."""

    def __init__(self, system_prompt: str | None = None) -> None:
        self.tokenizer = None  # type: ignore[assignment]
        self.has_template = self.chat = self.insists_on_chat = True
        self.system_prompt, self.images, self.template_kwargs = system_prompt, None, {}


class _Served:
    """A chat format that the endpoint has."""

    stop_token_ids: tuple[int, ...] = ()
    takes_tools = True

    def closes(self, token_id: int) -> bool:
        raise NotImplementedError("an endpoint's tokens are not known")

    def render(self, messages: list[Message], tools: list[ToolSpec]) -> list[int]:
        raise NotImplementedError("an endpoint's tokens are not known")

    def extend(self, past: Any, new: list[Message]) -> list[int] | None:
        raise NotImplementedError("an endpoint's tokens are not known")

    def parse(self, completion_ids: list[int], prompt_ids: list[int], tools: list[ToolSpec]) -> AssistantTurn:
        raise NotImplementedError("an endpoint's tokens are not known")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
