"""The rollout worker: an engine, the policy version it serves, and the checks around both."""

from __future__ import annotations

from typing import Any

from mrl.config import ModelConfig
from mrl.engines import ENGINES, Engine
from mrl.errors import EngineError
from mrl.sync.checksum import checksum
from mrl.types import Completion, GenerateRequest, TokenSequence, WeightRef


class RolloutWorker:
    """Generates with one engine. Lives on any backend; everything it is given is plain data.

    The engine is made with the first weights, so that a worker which is handed a live module loads no copy of its own.
    """

    def __init__(self, engine: str, model: dict[str, Any]) -> None:
        self.engine_class = ENGINES.get(engine)
        self.model_config = ModelConfig(**model)
        self.engine: Engine | None = None

    def load(self) -> None:
        """Serve the configured model as it is, as version 0. Raises ModelError, EngineError."""
        self.engine = self.engine_class.create(self.model_config)

    def update_weights(self, ref: WeightRef) -> dict[str, Any]:
        """Serve `ref` from now on. Returns the version now active and the checksum of what is held.

        Raises SyncError; the weights from before are then still served.
        """
        if self.engine is None:
            self.engine = self.engine_class.create(self.model_config, ref.module)
        version = self.engine.load_weights(ref)
        return {"version": version, "checksum": None if ref.checksum is None else self._checksum(ref)}

    async def generate(self, requests: list[GenerateRequest]) -> list[Completion]:
        """One completion per request, in order, each with the version that produced it. Raises EngineError."""
        return await self._ready().generate(requests)

    async def compute_logprobs(self, sequences: list[TokenSequence]) -> list[list[float]]:
        """Logprob of every completion token at the sequence's temperature."""
        return await self._ready().logprobs(sequences)

    def health(self) -> dict[str, Any]:
        """The version served, or None before the first sync."""
        return {"version": None if self.engine is None else self.engine.version}

    def close(self) -> None:
        """Free the engine."""
        if self.engine is not None:
            self.engine.close()
            self.engine = None

    def _ready(self) -> Engine:
        if self.engine is None:
            raise EngineError("this rollout worker has no weights yet: sync weights to it before it generates")
        return self.engine

    def _checksum(self, ref: WeightRef) -> str:
        from safetensors import safe_open

        assert ref.path is not None
        with safe_open(f"{ref.path}/model.safetensors", framework="pt") as file:
            names = list(file.keys())
        return checksum(self._ready().state_dict(), names)
