"""Engine `vllm-remote`: a running `vllm serve`, by its URL. Token ids in and out of `/v1/completions`.

The server has to be started with these options, which is checked when the engine is created:

- always `--logprobs-mode processed_logprobs`, so that logprobs are those of the distribution drawn from;
- to train an adapter: `--enable-lora`, and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment;
- to train all weights: VLLM_SERVER_DEV_MODE=1, mrl's worker extension (see `process/extension.py`), and
  `--enable-scale-out`, whose responses contain each token's weight version.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

import httpx

from mrl.engines.requests import check_sequence, end_ids, refusal, sampling_fields, versions_per_token
from mrl.engines.vllm.adapter import ServedAdapter
from mrl.errors import EngineDied, EngineError, SyncError
from mrl.system.gather import all_of
from mrl.types import Completion, FinishReason, GenerateRequest, TokenSequence, WeightRef
from mrl.weights.checksum import checksum
from mrl.weights.tensors import open_folder

if TYPE_CHECKING:
    from torch import Tensor, nn

    from mrl.config import ModelConfig

_CAPACITY = 256
_PLAIN = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Set in each request, because a server takes missing options from the model's generation config."""
_TOKEN_ROUTE = "/inference/v1/generate"
_Tokens = tuple[list[int], list[float], FinishReason, int | list[int]]
"""Ids, logprobs, finish reason, and policy version (one, or one per token)."""


class RemoteVLLMEngine:
    """One policy on a server that the user runs. Create it with `create`."""

    accepts = frozenset({"weights", "adapter"})
    """Kinds of WeightRef it loads. The server needs access to the folder under the same path."""
    capacity = _CAPACITY
    _repeatable = True
    dtype: str | None = None
    """Dtype of the server's weights; not known, so weights are sent in the actor's."""

    def __init__(self, config: ModelConfig, url: str, key: str | None, name: str | None, seconds: float) -> None:
        self._url, self._seconds = url.rstrip("/"), seconds
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._limits = httpx.Limits(max_connections=_CAPACITY)
        self._clients: dict[asyncio.AbstractEventLoop, httpx.AsyncClient] = {}
        self._end_ids = end_ids(config)
        self.version = 0
        self._held: str | None = None
        self._adapter: ServedAdapter | None = None
        served = {model["id"]: model for model in self._call("GET", "/v1/models")["data"]}
        if name is not None and name not in served:
            raise EngineError(f"vllm_model_name: {self._url} serves {', '.join(served)}, not {name!r}")
        self._name = name or next(iter(served))
        own = served[self._name].get("max_model_len") or config.max_model_len
        self._max_model_len = min(own, config.max_model_len)
        self._vocab_size: int | None = None
        self._check_logprobs()
        self._extended = self._set_up()
        self._tells_versions = self._extended and self._has_token_route()
        self._versions: dict[str, int] = {}
        """Policy version by the name the server has for it; a bare number could be another run's."""
        if self._tells_versions:
            self._versions[self._call("GET", "/weight_info")["weight_version"]] = 0

    @classmethod
    def create(
        cls,
        config: ModelConfig,
        module: nn.Module | None = None,
        *,
        url: str,
        vllm_api_key_env: str | None = None,
        vllm_model_name: str | None = None,
        sync_timeout: float = 300.0,
        lora_sync: str = "adapter",
        repeatable_sampling: bool | None = None,
    ) -> Self:
        """Connect to the server; its current weights are version 0. Raises EngineError, ModelError.

        The options are those of `mrl.config.ServingConfig`; `url` is one of its `vllm_urls`.
        """
        if module is not None:
            raise EngineError("a server cannot share a module with the actor; use weight_sync_method: reload or volume")
        key = None
        if vllm_api_key_env is not None:
            key = os.environ.get(vllm_api_key_env)
            if not key:
                raise EngineError(f"vllm_api_key_env: the environment has no {vllm_api_key_env}")
        engine = cls(config, url, key, vllm_model_name, sync_timeout)
        engine._repeatable = repeatable_sampling is not False
        return engine

    async def generate(self, requests: list[GenerateRequest]) -> list[Completion]:
        """Sample one completion per request, in the order of the requests; see `mrl.engines.base.Engine.generate`."""
        return await all_of([self._answer(request) for request in requests])

    async def logprobs(self, sequences: list[TokenSequence]) -> list[list[float]]:
        """Logprob of every completion token at the sequence's temperature (no top-p, top-k, min-p).

        Raises EngineError for a temperature other than 1 where the server lacks mrl's extension: plain vLLM
        scores at 1.
        """
        for number, sequence in enumerate(sequences):
            check_sequence(number, sequence, self._max_model_len, self._vocab_size)
            if sequence.temperature != 1 and not self._extended:
                raise EngineError(
                    f"sequence {number} has temperature={sequence.temperature}: a plain vLLM server scores at 1 only; "
                    "start it with mrl's worker extension (docs/vllm.md)"
                )
        return await all_of([self._score(sequence) for sequence in sequences])

    async def pause(self, *, mode: str = "keep") -> None:
        """Stop scheduling; needs VLLM_SERVER_DEV_MODE=1 on the server."""
        await self._post(f"/pause?mode={mode}&clear_cache=false", {})

    async def resume(self) -> None:
        """Continue after `pause`."""
        await self._post("/resume", {})

    async def health(self) -> dict[str, Any]:
        """The server's URL and served model. Raises EngineDied when it does not answer."""
        await asyncio.to_thread(self._call, "GET", "/health")
        return {"url": self._url, "model": self._adapter.name if self._adapter else self._name}

    def load_weights(self, ref: WeightRef) -> int:
        """Make `ref` the active policy and return its version. Raises SyncError, which says what the server lacks."""
        if ref.path is None:
            raise SyncError("a server takes weights from a folder that it sees; it cannot use a module")
        try:
            if ref.kind == "adapter":
                self._held = self._load_adapter(ref)
            elif ref.kind == "weights":
                self._held = self._load_tensors(ref)
            else:
                raise SyncError(f"engine vllm-remote does not take weights as {ref.kind!r}")
        except EngineError as error:
            raise SyncError(f"version {ref.version} could not be loaded by {self._url}: {error}") from error
        self.version = ref.version
        return self.version

    def held(self) -> str | None:
        """Checksum of the weights last loaded: of all tensors as the server's workers computed it, or of the adapter's
        files that the server lists."""
        return self._held

    def state_dict(self) -> dict[str, Tensor]:
        """Raises EngineError: the tensors are in the server. See `held`."""
        raise EngineError("a server's tensors cannot be shown")

    def close(self) -> None:
        """Disconnect; the server keeps running with its last weights. Calling it twice is allowed."""
        self._clients.clear()

    # --- tokens -----------------------------------------------------------------------------------------------------

    async def _answer(self, request: GenerateRequest) -> Completion:
        refused = refusal(request, self._max_model_len, self._vocab_size, version=self.version)
        if refused is not None:
            return refused
        try:
            return await self._generate(request)
        except EngineDied:
            raise
        except EngineError as error:
            return Completion.failed(request, str(error), self.version)

    async def _generate(self, request: GenerateRequest) -> Completion:
        sampling = sampling_fields(request, self._end_ids, self._max_model_len)
        sampling |= {"logprobs": 0, "include_stop_str_in_output": True}
        sampling |= {"seed": request.seed} if self._repeatable else {}
        ask = self._tokens_and_versions if self._tells_versions and self._adapter is None else self._tokens
        token_ids, logprobs, reason, version = await ask(list(request.prompt_ids), sampling)
        if len(logprobs) != len(token_ids):
            raise EngineError(f"{self._url} gave {len(logprobs)} logprobs for {len(token_ids)} tokens")
        if request.sampling.temperature == 0:
            logprobs = [0.0] * len(token_ids)
        return Completion(request.id, token_ids, logprobs, reason, version)

    async def _tokens(self, prompt_ids: list[int], sampling: dict[str, Any]) -> _Tokens:
        """All tokens from one version: a request keeps its adapter to the end, and the base weights never change."""
        answer, version = await self._complete({**sampling, "prompt": prompt_ids, "return_token_ids": True})
        choice = answer["choices"][0]
        logprobs = choice["logprobs"]["token_logprobs"] if choice["logprobs"] else []
        return choice["token_ids"], logprobs, choice["finish_reason"], version

    async def _tokens_and_versions(self, prompt_ids: list[int], sampling: dict[str, Any]) -> _Tokens:
        """Tokens whose version may change midway; the response says where."""
        sampling = {**_PLAIN, **sampling, "detokenize": "stop" in sampling}
        body = {"model": self._name, "token_ids": prompt_ids, "sampling_params": sampling}
        choice = (await self._post(_TOKEN_ROUTE, body))["choices"][0]
        logprobs = [token["logprob"] for token in choice["logprobs"]["content"]] if choice["logprobs"] else []
        spans = [[self._version_of(span["version"]), span["start"]] for span in choice["weight_versions"] or []]
        version = versions_per_token(spans, len(choice["token_ids"]), self.version)
        return choice["token_ids"], logprobs, choice["finish_reason"], version

    def _version_of(self, name: str) -> int:
        if name not in self._versions:
            raise SyncError(f"{self._url} serves weights that this run did not send it (it calls them {name!r})")
        return self._versions[name]

    async def _score(self, sequence: TokenSequence) -> list[float]:
        if not sequence.completion_ids:
            return []
        *before, last = sequence.completion_ids
        ids = [*sequence.prompt_ids, *before]
        body = {
            "prompt": ids,
            "max_tokens": 1,
            "temperature": sequence.temperature,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "logprob_token_ids": [last],
            "logprobs": 0,
            "return_tokens_as_token_ids": True,
        }
        if before:
            body["prompt_logprobs"] = 0
        answer, _ = await self._complete(body)
        choice = answer["choices"][0]
        known = [
            choice["prompt_logprobs"][at][str(ids[at])]["logprob"] for at in range(len(sequence.prompt_ids), len(ids))
        ]
        return [*known, choice["logprobs"]["top_logprobs"][0][f"token_id:{last}"]]

    async def _complete(self, body: dict[str, Any]) -> tuple[dict[str, Any], int]:
        """The response, and the version that sampled all of it."""
        while True:
            adapter = self._adapter
            if adapter is None:
                return await self._post("/v1/completions", {"model": self._name, **_PLAIN, **body}), self.version
            try:
                with adapter.used():
                    return await self._post(
                        "/v1/completions", {"model": adapter.name, **_PLAIN, **body}
                    ), adapter.version
            except _NotFound:
                if adapter is self._adapter:
                    raise
                # A newer adapter replaced it before the request arrived.

    # --- set-up and weights -----------------------------------------------------------------------------------------

    def _check_logprobs(self) -> None:
        """Raise EngineError unless logprobs are processed: with top_k=1 the only token left must have logprob 0."""
        body = {"model": self._name, "prompt": [0], "max_tokens": 1, "temperature": 1.0, "top_k": 1, "logprobs": 0}
        choice = self._call("POST", "/v1/completions", {**_PLAIN, **body})["choices"][0]
        if choice["logprobs"]["token_logprobs"][0] < -1e-3:
            raise EngineError(
                f"{self._url} gives logprobs before temperature and top-p: start it with "
                "`--logprobs-mode processed_logprobs`"
            )

    def _set_up(self) -> bool:
        """Whether the server has mrl's worker extension."""
        try:
            self._call("POST", "/collective_rpc", {"method": "mrl_set_up"})
        except EngineError:
            return False
        return True

    def _has_token_route(self) -> bool:
        """Whether the server has the route whose responses contain weight versions."""
        try:
            self._call("POST", _TOKEN_ROUTE, {"token_ids": [0], "sampling_params": {"max_tokens": 1}})
        except EngineDied:
            raise
        except EngineError:
            return False
        return True

    def _load_adapter(self, ref: WeightRef) -> str:
        """Load the adapter under a new unique name, so that nothing cached for another one is used."""
        assert ref.path is not None
        with open_folder(ref.path) as tensors:
            found = checksum(tensors)
        adapter = ServedAdapter(ref)
        try:
            self._give(adapter)
        except (EngineError, SyncError):
            adapter.replaced()
            raise
        before, self._adapter = self._adapter, adapter
        if before is not None:
            self._call("POST", "/v1/unload_lora_adapter", {"lora_name": before.name})
            before.replaced()
        return found

    def _give(self, adapter: ServedAdapter) -> None:
        try:
            self._call("POST", "/v1/load_lora_adapter", {"lora_name": adapter.name, "lora_path": str(adapter.folder)})
        except _NotFound:
            raise SyncError(
                f"{self._url} takes no adapters while it runs: start it with --enable-lora --max-lora-rank R and "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment"
            ) from None
        listed = {model["id"]: model.get("root") for model in self._call("GET", "/v1/models")["data"]}
        if listed.get(adapter.name) != str(adapter.folder):
            raise SyncError(
                f"{self._url} does not list the adapter {adapter.name} of {adapter.folder} after loading it"
            )

    def _load_tensors(self, ref: WeightRef) -> str | None:
        if not self._extended:
            raise SyncError(
                f"{self._url} takes no weights while it runs: start it with VLLM_SERVER_DEV_MODE=1 in its environment, "
                "--enable-scale-out, --worker-extension-cls mrl.engines.vllm.process.extension.WorkerExtension and "
                """--weight-transfer-config '{"backend": "mrl"}' (docs/vllm.md), or train an adapter"""
            )
        if not self._tells_versions:
            raise SyncError(
                f"{self._url} does not tell which weights a token is from, and an update may come between two tokens: "
                "start it with --enable-scale-out too (docs/vllm.md)"
            )
        name = f"{uuid.uuid4().hex}:{ref.version}"
        self._versions[name] = ref.version  # before its first token can arrive
        self._call("POST", "/pause?mode=keep", {})
        whole = False
        try:
            self._call("POST", "/start_weight_update", {})
            update = {"path": ref.path, "checksum": ref.checksum}
            self._call("POST", "/update_weights", {"update_info": update})
            self._call("POST", "/finish_weight_update", {"weight_version": name})
        finally:
            workers = self._call("POST", "/collective_rpc", {"method": "mrl_held"})["results"]
            whole = all(worker["whole"] for worker in workers)
            if whole:  # otherwise it stays paused: a partial update is never served
                self._call("POST", "/resume", {})
        held = {worker["checksum"] for worker in workers}
        if len(held) > 1:
            raise SyncError(f"the processes of {self._url} hold different weights: {held}")
        checksum_held: str | None = held.pop()
        return checksum_held

    # --- http -------------------------------------------------------------------------------------------------------

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Blocking request, from any thread."""
        try:
            with httpx.Client(headers=self._headers, timeout=self._seconds) as client:
                return _answer(client.request(method, self._url + path, json=body))
        except httpx.HTTPError as error:
            raise self._died(error) from error

    async def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Request on the running event loop. No timeout of its own: the call to the worker has one."""
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            timeout = httpx.Timeout(None, connect=30.0)
            self._clients[loop] = httpx.AsyncClient(headers=self._headers, timeout=timeout, limits=self._limits)
        try:
            return _answer(await self._clients[loop].post(self._url + path, json=body))
        except httpx.HTTPError as error:
            raise self._died(error) from error

    def _died(self, error: httpx.HTTPError) -> EngineDied:
        return EngineDied(f"vllm_urls: {self._url} does not answer ({type(error).__name__}: {error})")


class _NotFound(EngineError):
    """The server has no such route."""


def _answer(response: httpx.Response) -> dict[str, Any]:
    """The JSON of a successful response. Raises EngineError with the server's message otherwise."""
    if response.status_code == httpx.codes.NOT_FOUND:
        raise _NotFound(f"{response.url} is not there: {response.text[:500]}")
    if response.is_error:
        raise EngineError(f"{response.url} answers {response.status_code}: {response.text[:1000]}")
    try:
        parsed = response.json()
    except ValueError:
        parsed = None
    return parsed if isinstance(parsed, dict) else {}
