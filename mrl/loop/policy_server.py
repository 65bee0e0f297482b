"""The policy over HTTP for as long as a run or an evaluation samples (`serve`), always with its newest weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from mrl.config import OrchestratorConfig
from mrl.rollouts import BatchSource, PolicyClient, RolloutSource, SourceSetup
from mrl.rollouts.function.sampling import Seeds
from mrl.server.app import create_app
from mrl.server.serving import Serving
from mrl.types import Completion, GenerateRequest, TokenSequence, derive_seed


class PolicyServer:
    """Takes the run's address when it is made; without `serve` it does nothing. Raises ConfigError."""

    def __init__(self, config: OrchestratorConfig) -> None:
        self.options, self.seed = config.rollout, config.training.seed
        self.serving = self._taken()
        self.gate = Gate()

    @asynccontextmanager
    async def running(
        self, policy: PolicyClient, setup: SourceSetup, source: RolloutSource | BatchSource
    ) -> AsyncIterator[None]:
        """The routes are there inside. source: learns the address, and says the seeds of what it asks for."""
        self.serving = self.serving or self._taken()  # given up in between, where a run goes on after its actor's death
        if self.serving is None:
            yield
            return
        seed_of = getattr(source, "seed_of", None) or Seeds(derive_seed(self.seed, "serve"))
        served = ServedPolicy(policy, self.gate)
        await self.serving.start(create_app(served, setup, seed_of, token=self.serving.token))
        if hasattr(source, "url"):
            source.url = self.serving.url
        try:
            yield
        finally:
            await self.serving.stop()
            self.serving = None

    def close(self) -> None:
        """Free the address, where it was never served."""
        if self.serving is not None:
            self.serving.socket.close()
            self.serving = None

    def _taken(self) -> Serving | None:
        address = self.options.serve_at
        return None if address is None else Serving(address, self.options.serve_token_env)


class Gate:
    """Lets requests through, or has them wait while weights are not to be touched."""

    def __init__(self) -> None:
        self.passing = 0
        self._holding = 0
        self._opened, self._empty = asyncio.Event(), asyncio.Event()
        self._opened.set()
        self._empty.set()

    @asynccontextmanager
    async def held(self, when: bool = True) -> AsyncIterator[None]:
        """Nothing passes inside; it begins when what was passing is through."""
        if not when:
            yield
            return
        self._holding += 1
        self._opened.clear()
        try:
            await self._empty.wait()
            yield
        finally:
            self._holding -= 1
            if not self._holding:
                self._opened.set()

    @asynccontextmanager
    async def passed(self) -> AsyncIterator[None]:
        """Waits until it is open."""
        while not self._opened.is_set():
            await self._opened.wait()
        self.passing += 1
        self._empty.clear()
        try:
            yield
        finally:
            self.passing -= 1
            if not self.passing:
                self._empty.set()


class ServedPolicy:
    """A PolicyClient for those who ask at any time, also while the actor trains."""

    def __init__(self, policy: PolicyClient, gate: Gate) -> None:
        self.policy, self.gate = policy, gate
        self.max_model_len = policy.max_model_len

    @property
    def version(self) -> int:
        """The policy's."""
        return self.policy.version

    async def generate(self, request: GenerateRequest) -> Completion:
        """As the policy's, in its time."""
        async with self.gate.passed():
            return await self.policy.generate(request)

    async def logprobs(self, sequences: list[TokenSequence]) -> list[list[float]]:
        """As the policy's, in its time."""
        async with self.gate.passed():
            return await self.policy.logprobs(sequences)
