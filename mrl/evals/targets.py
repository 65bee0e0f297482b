"""Who an evaluation test is run against: an endpoint, a checkpoint, a run's policy."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import httpx

from mrl.backends import Backend
from mrl.config import OrchestratorConfig
from mrl.errors import ConfigError
from mrl.evals.evaluation import open_policy
from mrl.evals.run_models import as_in_run
from mrl.loop.preflight import check_engine, check_names, sampling_params
from mrl.loop.resources import check_resources, rollout_resources
from mrl.loop.spawning import backend_of
from mrl.models import context_length, load_config, load_processor, load_tokenizer
from mrl.processors.base import MAX_TOKENS, limits_of, sampling_of
from mrl.rollouts import MessagePolicy, PolicyClient, SourceSetup, TurnLimits
from mrl.rollouts.endpoint import ADDRESSES, PROVIDERS, Endpoint, endpoint_setup
from mrl.rollouts.prompts import PromptEncoder
from mrl.system.threads import in_thread
from mrl.types import SamplingParams

KEY = "OPENAI_API_KEY"
"""The environment variable with the key of an endpoint that is no known provider's."""
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "stop")


@dataclass
class Target:
    """A policy, as a processor's rollouts need it."""

    label: str
    policy: PolicyClient | MessagePolicy
    setup: SourceSetup
    params: dict[str, Any]
    """completion_params as they are used."""
    config: OrchestratorConfig
    """For the record."""


class Targets:
    """Opens policies, each local one once. model: instead of what completion_params name. options: flat options that
    go before them."""

    def __init__(self, model: str | None, options: dict[str, Any]) -> None:
        self.model, self.options = model, options
        self._backends: list[Backend] = []
        self._local: dict[str, tuple[PolicyClient, SourceSetup, OrchestratorConfig]] = {}
        self._endpoints: list[Endpoint] = []

    async def of(self, params: dict[str, Any], steps: int, *, check: bool = True) -> Target:
        """The policy for these completion_params. check: whether an endpoint answers. Raises ConfigError, ModelError,
        EngineError."""
        params = params | {name: self.options[name] for name in SAMPLING if self.options.get(name) is not None}
        if "max_tokens" in self.options:
            params.pop("max_completion_tokens", None)
        name = self.model or params.get("model")
        if not isinstance(name, str) or not name:
            raise ConfigError(
                "nothing says which model to evaluate: give --model, or the test's completion_params a model"
            )
        if is_address(name):
            served = self.options.get("vllm_model_name") or await served_model(name, params.get("model"))
            return await self._endpoint(params | {"model": served, "base_url": name}, steps, check, served)
        if self.model is None and asks_endpoint(params):
            return await self._endpoint(params, steps, check)
        policy, setup, config = await self._opened(name)
        params = {**params, "model": name}
        params.pop("base_url", None)
        limits = replace(
            self._limits(config, params, steps),
            turn_tokens=limits_of(params, steps).turn_tokens or config.generation.max_tokens or MAX_TOKENS,
        )
        sampling = sampling_of(params, setup.sampling)
        return Target(name, policy, replace(setup, sampling=sampling, limits=limits), params, config)

    def nobody(self, params: dict[str, Any]) -> Target:
        """For rows that have their answers: there is nobody to ask."""
        name = str(self.model or params.get("model") or "answers of the rows")
        endpoint = Endpoint(name, "http://127.0.0.1:9")  # where nothing listens
        setup = endpoint_setup(sampling_of(params), TurnLimits())
        return Target(name, endpoint, setup, params, OrchestratorConfig.from_flat(model=name))

    async def close(self) -> None:
        """End everything that was opened."""
        for endpoint in self._endpoints:
            await endpoint.close()
        for backend in self._backends:
            await backend.close()

    # --- inner ------------------------------------------------------------------------------------------------------

    async def _endpoint(self, params: dict[str, Any], steps: int, check: bool, served: str | None = None) -> Target:
        """served: the model's name there, as it is; else one that may begin with a provider's."""
        endpoint = Endpoint.of(params)
        endpoint.model = served or endpoint.model
        self._endpoints.append(endpoint)
        if check:
            await endpoint.check()
        given = {name: value for name, value in self.options.items() if name != "dataset_name"}
        config = OrchestratorConfig.from_flat(**given | {"model": endpoint.model})
        setup = endpoint_setup(sampling_of(params), self._limits(config, params, steps), params.get("system_prompt"))
        return Target(f"{endpoint.model} at {endpoint.base_url}", endpoint, setup, params, config)

    def _limits(self, config: OrchestratorConfig, params: dict[str, Any], steps: int) -> TurnLimits:
        options = config.rollout
        return replace(
            limits_of(params, options.max_turns or steps),
            rollout_tokens=options.max_rollout_tokens,
            step_seconds=options.step_timeout,
            rollout_seconds=options.rollout_timeout,
        )

    async def _opened(self, name: str) -> tuple[PolicyClient, SourceSetup, OrchestratorConfig]:
        if name not in self._local:
            config = local_config(name, self.options)
            check_names(config)
            check_resources(config, rollout_resources(config))
            check_engine(config)
            tokenizer = await in_thread(load_tokenizer, config.model)
            processor = await in_thread(load_processor, config.model)
            encoder = PromptEncoder.of(tokenizer, config.data, processor)
            model = await in_thread(load_config, config.model)
            limit = context_length(model, config.model.max_model_len)
            sampling: SamplingParams = sampling_params(config)
            setup = SourceSetup(tokenizer, encoder, sampling, TurnLimits(), model.get_text_config().vocab_size)
            backend = backend_of(config)
            self._backends.append(backend)
            self._local[name] = await open_policy(backend, config, limit), setup, config
        return self._local[name]


def local_config(name: str, options: dict[str, Any]) -> OrchestratorConfig:
    """Of a model by its folder, its Hub id, or the run whose it is. Raises ConfigError, CheckpointError."""
    return OrchestratorConfig.from_flat(**as_in_run(name, options))


def is_address(name: str) -> bool:
    """Whether a model's name is where one is served."""
    return name.startswith(("http://", "https://"))


def asks_endpoint(params: dict[str, Any]) -> bool:
    """Whether completion_params name an endpoint rather than a model of this machine's."""
    provider, slash, _ = str(params.get("model") or "").partition("/")
    named = bool(params.get("base_url") or params.get("api_base")) or (bool(slash) and provider in PROVIDERS)
    return named or any(os.environ.get(name) for name in ADDRESSES)


async def served_model(address: str, wanted: str | None) -> str:
    """The model that is asked at an address: the one that a test names, if it is there, else the only one.

    Raises ConfigError where that is none.
    """
    url, key = f"{address.rstrip('/')}/models", os.environ.get(KEY)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    provider, slash, rest = (wanted or "").partition("/")
    meant = rest if slash and provider in PROVIDERS else wanted
    try:
        async with httpx.AsyncClient(timeout=30, headers=headers) as client:
            answer = await client.get(url)
            if answer.status_code == 401:
                said = "refuses the key" if key else "needs a key"
                raise ConfigError(f"{address} {said}: put one into the environment variable {KEY}")
            answer.raise_for_status()
            names = [str(one["id"]) for one in answer.json()["data"]]
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        if meant and not isinstance(error, httpx.ConnectError):
            return meant
        raise ConfigError(
            f"--model {address}: {url} does not say which models it has ({type(error).__name__}: {error}); is it the "
            "right address? else give the option vllm_model_name, or the test's completion_params a model"
        ) from None
    if found := next((one for one in (wanted, meant) if one in names), None):
        return found
    if len(names) != 1:
        also = f", and no {meant}" if meant else ""
        raise ConfigError(
            f"--model {address}: it has {len(names)} models ({', '.join(names[:5])}){also}; say which with the option "
            "vllm_model_name"
        )
    return names[0]
