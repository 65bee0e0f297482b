"""Rollouts that somebody's HTTP service makes: it is told a row and where to ask the model, and says how it ended."""

from __future__ import annotations

import asyncio
import base64
import json
import os
from dataclasses import dataclass
from time import monotonic, perf_counter
from typing import Any

import httpx

from mrl.errors import ConfigError, EnvError
from mrl.evaltests.messages import Message
from mrl.evaltests.rows import EvaluationRow, Usage, content_id, new_id
from mrl.evaltests.status import Code, Status
from mrl.processors.base import RolloutProcessor, RolloutProcessorConfig, limits_of, sampling_of
from mrl.processors.gateway import MODEL, Gateway, Traced
from mrl.rollouts.endpoint import Endpoint, endpoint_setup
from mrl.types import Sample

SECONDS_TO_BEGIN = 600.0
"""How long `/init` may take."""
IDS = ("rollout_id", "invocation_id", "experiment_id", "run_id", "row_id")


@dataclass
class _Where:
    """Where the service asks the model, and where how it ended is told."""

    told: str
    """Without the ids."""
    traced: Traced | None
    """What was seen of it here; None = somebody else's gateway keeps it."""


class RemoteRolloutProcessor(RolloutProcessor):
    """`POST {remote_base_url}/init` begins a rollout, with the row's messages and tools, ids, and an address for chat
    completions that has these ids in it. The service asks the model there, and says how it ended: with a log of its
    status (`POST {address}/logs`), or when it is asked (`GET {remote_base_url}/status?rollout_id=`).

    model_base_url: None = an address of this process's, which the evaluated or trained policy answers, token by token
    (gateway_address: `host:port` it listens at; from other machines with the key in MRL_GATEWAY_TOKEN). Or another
    tracing gateway in Eval Protocol's form, which asks a model of its own and is asked for what was said; that can be
    evaluated, and not trained on. poll_interval, timeout_seconds: of waiting for the end. include_payloads: ask that
    gateway for tokens and logprobs too. Variables: EP_REMOTE_ROLLOUT_PROCESSOR_BASE_URL, EP_MODEL_BASE_URL.
    """

    def __init__(
        self,
        *,
        remote_base_url: str | None = None,
        model_base_url: str | None = None,
        poll_interval: float = 1.0,
        timeout_seconds: float = 120.0,
        include_payloads: bool = False,
        gateway_address: str = "127.0.0.1:0",
    ) -> None:
        self.remote_base_url = os.environ.get("EP_REMOTE_ROLLOUT_PROCESSOR_BASE_URL") or remote_base_url
        self.model_base_url = os.environ.get("EP_MODEL_BASE_URL") or model_base_url
        self.poll_interval, self.timeout_seconds = poll_interval, timeout_seconds
        self.include_payloads, self.gateway_address = include_payloads, gateway_address
        self.gives_tokens = self.model_base_url is None
        self._gateway: Gateway | None = None
        self._client: httpx.AsyncClient | None = None
        self._endpoints: list[Endpoint] = []
        self._samples: dict[str, list[Sample]] = {}

    def samples(self, name: str) -> list[Sample]:
        """What the policy sampled in a rollout, once."""
        return self._samples.pop(name, [])

    def __call__(self, rows: list[EvaluationRow], config: RolloutProcessorConfig) -> list[asyncio.Task[EvaluationRow]]:
        remote = self.remote_base_url or config.kwargs.get("remote_base_url")
        if not remote:
            raise ConfigError("RemoteRolloutProcessor: nothing says where the service is; give remote_base_url")
        policy, setup = config.policy, config.setup
        if policy is None and self.model_base_url is None:
            policy = Endpoint.of(config.completion_params)
            self._endpoints.append(policy)
        if setup is None:
            params = config.completion_params
            setup = endpoint_setup(sampling_of(params), limits_of(params, config.steps))

        async def attempt(row: EvaluationRow) -> EvaluationRow:
            async with config.semaphore:
                start = perf_counter()
                _name(row)
                name = str(row.execution_metadata.rollout_id)
                if self.model_base_url is not None:
                    where = _Where(self.model_base_url, None)
                else:
                    gateway = await self._opened()
                    where = _Where(gateway.url, gateway.open(name, policy, setup, config.seed))  # type: ignore[arg-type]
                try:
                    done = await self._attempt(row, str(remote).rstrip("/"), where, config)
                finally:
                    if self._gateway is not None:
                        self._gateway.close(name)
                done.execution_metadata.rollout_duration_seconds = perf_counter() - start
                return done

        return [asyncio.create_task(attempt(row)) for row in rows]

    async def acleanup(self) -> None:
        """End connections, and stop answering."""
        if self._gateway is not None:
            await self._gateway.stop()
            self._gateway = None
        for endpoint in self._endpoints:
            await endpoint.close()
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    # --- inner ------------------------------------------------------------------------------------------------------

    async def _opened(self) -> Gateway:
        if self._gateway is None:
            self._gateway = Gateway(self.gateway_address)
        await self._gateway.start()
        return self._gateway

    def _http(self) -> httpx.AsyncClient:
        if self._client is None:
            limits = httpx.Limits(max_connections=None)
            self._client = httpx.AsyncClient(timeout=SECONDS_TO_BEGIN, limits=limits)
        return self._client

    async def _attempt(
        self, row: EvaluationRow, remote: str, where: _Where, config: RolloutProcessorConfig
    ) -> EvaluationRow:
        name = str(row.execution_metadata.rollout_id)
        url = f"{remote}/init"
        try:
            answer = await self._http().post(url, json=self._request(row, where, config))
        except httpx.HTTPError as error:
            raise EnvError(f"{url}: {type(error).__name__}: {error}") from error
        if answer.is_error:
            raise EnvError(f"{url} answered HTTP {answer.status_code}: {answer.text[:300]}")
        status = await self._ended(name, remote, where, config)
        code = int(status.get("code", Code.UNKNOWN))
        if code not in (Code.FINISHED, Code.OK):
            raise EnvError(f"{remote}: the rollout ended with status {code}: {status.get('message') or 'no message'}")
        if where.traced is None:
            await self._fetch(row, where.told)
        else:
            self._take(row, where.traced)
        row.rollout_status = Status(code=Code.FINISHED, message=str(status.get("message") or "Rollout finished"))
        return row

    def _request(self, row: EvaluationRow, where: _Where, config: RolloutProcessorConfig) -> dict[str, Any]:
        """Eval Protocol's InitRequest."""
        params = {**config.completion_params, **row.input_metadata.completion_params}
        ids = {name: getattr(row.execution_metadata, name, None) for name in IDS} | {
            "row_id": row.input_metadata.row_id
        }
        base = where.told.rstrip("/") + "".join(f"/{name}/{ids[name]}" for name in IDS)
        key = os.environ.get("EP_REMOTE_API_KEY") or os.environ.get("FIREWORKS_API_KEY")
        if where.traced is not None:
            params = {name: value for name, value in params.items() if name not in ("base_url", "api_base", "api_key")}
            params["model"] = params.get("model") or MODEL
            key = os.environ.get("MRL_GATEWAY_TOKEN") or key
        elif asked := params.get("base_url"):
            base += f"/encoded_base_url/{base64.urlsafe_b64encode(str(asked).encode()).decode()}"
        return {
            "completion_params": params,
            "messages": [message.for_completion() for message in row.messages],
            "tools": row.tools,
            "model_base_url": base,
            "metadata": ids,
            "api_key": key,
        }

    async def _ended(self, name: str, remote: str, where: _Where, config: RolloutProcessorConfig) -> dict[str, Any]:
        """The status that it ended with. Raises EnvError when it takes too long."""
        seconds = float(config.kwargs.get("timeout_seconds", self.timeout_seconds))
        pause = float(config.kwargs.get("poll_interval", self.poll_interval))
        asks_service, deadline = True, monotonic() + seconds
        while monotonic() < deadline:
            status = where.traced.status if where.traced is not None else await self._status(where.told, name)
            if status is not None and status.get("code") != Code.RUNNING:
                return status
            if asks_service:
                asks_service, ended = await self._ask_service(remote, name)
                if ended is not None:
                    return ended
            await asyncio.sleep(pause)
        raise EnvError(f"{remote}: rollout {name} did not end within {seconds:g} s (timeout_seconds)")

    async def _ask_service(self, remote: str, name: str) -> tuple[bool, dict[str, Any] | None]:
        """Whether it can be asked, and what it ended with if it has."""
        try:
            answer = await self._http().get(f"{remote}/status", params={"rollout_id": name}, timeout=30)
            said = answer.json() if answer.status_code == 200 else None
        except (httpx.HTTPError, json.JSONDecodeError):
            return True, None
        if not isinstance(said, dict):
            return answer.status_code not in (404, 405), None
        if not said.get("terminated"):
            return True, None
        return True, said.get("status") or {"code": int(Code.FINISHED), "message": "Rollout finished"}

    async def _status(self, base: str, name: str) -> dict[str, Any] | None:
        found = await self._get(base, ("v1/status", "status"), {"rollout_id": name})
        status = (found or {}).get("status")
        return status if isinstance(status, dict) and "code" in status else None

    async def _get(self, base: str, paths: tuple[str, ...], params: dict[str, Any]) -> dict[str, Any] | None:
        key = os.environ.get("EP_REMOTE_API_KEY") or os.environ.get("FIREWORKS_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        for path in paths:
            try:
                answer = await self._http().get(f"{base.rstrip('/')}/{path}", params=params, headers=headers)
                if answer.status_code == 200:
                    found = answer.json()
                    return found if isinstance(found, dict) else None
            except (httpx.HTTPError, json.JSONDecodeError):
                continue
        return None

    def _take(self, row: EvaluationRow, traced: Traced) -> None:
        """What was seen of it here."""
        if len(traced.messages) <= len(row.messages):
            raise EnvError("the service ended the rollout without asking the model at the address it was given")
        row.messages = [Message.of(message) for message in traced.messages]
        row.tools = list(traced.tools) or row.tools
        total = traced.prompt_tokens + traced.completion_tokens
        row.execution_metadata.usage = Usage(
            prompt_tokens=traced.prompt_tokens, completion_tokens=traced.completion_tokens, total_tokens=total
        )
        extras = {k: v for k, v in traced.extras.items() if k not in ("logger_name", "level", "timestamp")}
        row.execution_metadata.extra = (row.execution_metadata.extra or {}) | extras
        self._samples[str(row.execution_metadata.rollout_id)] = traced.samples

    async def _fetch(self, row: EvaluationRow, base: str) -> None:
        """What another gateway has: the longest of its conversations."""
        params = {"tags": f"rollout_id:{row.execution_metadata.rollout_id}"}
        if self.include_payloads:
            params["include_payloads"] = "true"
        found = await self._get(base, ("v1/traces/pointwise",), params)
        talks = [_conversation(trace) for trace in (found or {}).get("traces") or []]
        longest = max(talks, key=len, default=[])
        if len(longest) <= len(row.messages):
            name = row.execution_metadata.rollout_id
            raise EnvError(f"{base} has no trace of rollout {name} that goes on from its row")
        row.messages = [Message.model_validate(message) for message in longest]
        if self.include_payloads:
            payloads = [trace["payloads"] for trace in (found or {})["traces"] if trace.get("payloads")]
            row.execution_metadata.extra = (row.execution_metadata.extra or {}) | {"payloads": payloads}


def _name(row: EvaluationRow) -> None:
    """Give a row the ids that it has not."""
    row.input_metadata.row_id = row.input_metadata.row_id or content_id(row)
    own = row.execution_metadata
    for name in ("rollout_id", "invocation_id", "experiment_id", "run_id"):
        if getattr(own, name) is None:
            setattr(own, name, new_id())


def _conversation(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """A trace's messages: what was asked, and what was said."""
    found: list[dict[str, Any]] = []
    for part in (trace.get("input"), trace.get("output")):
        listed = part.get("messages", [part]) if isinstance(part, dict) else part
        found += [one for one in listed or [] if isinstance(one, dict) and "role" in one]
    return found
