"""Who samples for a `rollout_func`: the run's policy, the module that TRL's trainer trains, or its vLLM server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from mrl.errors import ConfigError
from mrl.rollouts import PolicyClient
from mrl.rollouts.function.trainer import RolloutTrainer
from mrl.types import Completion, GenerateRequest, TokenSequence, WeightRef

LONGEST = 1 << 20
"""Tokens, where the model's own length is not known."""


class RunsPolicy:
    """The policy of a run of ours, whose event loop is another one than the environments'."""

    def __init__(self, trainer: RolloutTrainer) -> None:
        call = trainer._call
        self.inner: PolicyClient = call.sampler.policy
        self.loop, self.max_model_len = call.loop, self.inner.max_model_len

    @property
    def version(self) -> int:
        return self.inner.version

    async def generate(self, request: GenerateRequest) -> Completion:
        asked = asyncio.run_coroutine_threadsafe(self.inner.generate(request), self.loop)
        return await asyncio.wrap_future(asked)

    async def logprobs(self, sequences: list[TokenSequence]) -> list[list[float]]:
        asked = asyncio.run_coroutine_threadsafe(self.inner.logprobs(sequences), self.loop)
        return await asyncio.wrap_future(asked)


class EnginePolicy:
    """An engine of this process."""

    def __init__(self, engine: Any, max_model_len: int) -> None:
        self.engine, self.max_model_len = engine, max_model_len

    @property
    def version(self) -> int:
        return int(self.engine.version)

    async def generate(self, request: GenerateRequest) -> Completion:
        (done,) = await self.engine.generate([request])
        completion: Completion = done
        return completion

    async def logprobs(self, sequences: list[TokenSequence]) -> list[list[float]]:
        scored: list[list[float]] = await self.engine.logprobs(sequences)
        return scored


class PolicyOf:
    """Finds the policy of whichever trainer calls. url, model: of a vLLM server, where TRL's trainer uses one and does
    not say where it is."""

    def __init__(self, url: str, model: str) -> None:
        self.url, self.model = url, model
        self._engines: dict[str, EnginePolicy] = {}
        self._version = 0

    def __call__(self, trainer: Any) -> PolicyClient:
        """Raises ConfigError for a trainer that cannot be sampled with, EngineError for one that cannot be reached."""
        if isinstance(trainer, RolloutTrainer):
            return RunsPolicy(trainer)
        if getattr(trainer, "use_vllm", False):
            return self._served(trainer)
        return self._trained(trainer)

    def _trained(self, trainer: Any) -> PolicyClient:
        """The module itself, with its weights of now."""
        from mrl.engines.transformers.engine import TransformersEngine

        module = trainer.accelerator.unwrap_model(getattr(trainer, "model_wrapped", None) or trainer.model)

        def make() -> EnginePolicy:
            most = _length(module.config)
            engine = TransformersEngine(module, _tokenizer(trainer), max_model_len=most)
            return EnginePolicy(engine, most)

        policy = self._kept(f"module {id(module)}", make)
        self._version += 1
        # The trainer has changed it in place: what was computed with older weights is forgotten.
        policy.engine.load_weights(WeightRef(self._version, module=module))
        return policy

    def _served(self, trainer: Any) -> PolicyClient:
        from mrl.config import ModelConfig
        from mrl.engines.vllm.remote import RemoteVLLMEngine

        args = trainer.args
        if getattr(trainer, "vllm_mode", getattr(args, "vllm_mode", "server")) != "server":
            raise ConfigError(
                "vllm_mode: an engine inside TRL's trainer cannot be asked turn by turn while the environments wait; "
                "use vllm_mode='server', or use_vllm=False"
            )
        url = getattr(args, "vllm_server_base_url", None)
        if not url and getattr(args, "vllm_server_host", None):
            url = f"http://{args.vllm_server_host}:{args.vllm_server_port}"
        name = str(getattr(getattr(trainer.model, "config", None), "_name_or_path", "") or self.model)

        def make() -> EnginePolicy:
            engine = RemoteVLLMEngine.create(ModelConfig(model=name), url=url or self.url)
            return EnginePolicy(engine, _length(trainer.model.config))

        return self._kept(f"server {url or self.url}", make)

    def _kept(self, name: str, make: Callable[[], EnginePolicy]) -> EnginePolicy:
        if name not in self._engines:
            self._engines[name] = make()
        return self._engines[name]


def _length(config: Any) -> int:
    return int(getattr(config.get_text_config(), "max_position_embeddings", None) or LONGEST)


def _tokenizer(trainer: Any) -> Any:
    return getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
