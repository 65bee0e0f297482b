"""What an engine is: one policy, on one set of devices. Token ids in, token ids out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, Self

from mrl.types import Completion, GenerateRequest, TokenSequence, WeightRef

if TYPE_CHECKING:
    from torch import Tensor, nn

    from mrl.config import ModelConfig


class Engine(Protocol):
    """Implemented by one file per technology in this package.

    One that needs something of the machine may have a static method `check(**options)`, which raises ConfigError before
    a run begins; `create` gets the same options. One that counts what it samples may have `async sampled_tokens()`, the
    tokens since it was made; they are shown while a step waits for them.
    """

    version: int | None
    """The policy version now active; None while it has no weights to serve."""

    @classmethod
    def create(cls, config: ModelConfig, module: nn.Module | None = None) -> Self:
        """An engine for the configured model at version 0; around `module` where it can share one in this process.

        Raises ModelError, EngineError.
        """
        ...

    async def generate(self, requests: list[GenerateRequest]) -> list[Completion]:
        """Sample one completion per request, in the order of the requests. Calls may overlap.

        A request that cannot be served (empty, too long, ids outside the vocabulary, impossible sampling parameters,
        logits that are not finite, images for an engine that takes none) gets a completion with the reason "error" and
        takes no other with it. Raises EngineError when nothing can be served: closed, without weights; EngineDied.
        """
        ...

    async def logprobs(self, sequences: list[TokenSequence]) -> list[list[float]]:
        """Logprob of every completion token at the sequence's temperature (no top-p, top-k, min-p)."""
        ...

    def load_weights(self, ref: WeightRef) -> int:
        """Make `ref` the active policy and return its version. Raises SyncError; the old weights then stay whole."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """The tensors that are served, under their Hugging Face names."""
        ...

    def close(self) -> None:
        """Free devices and threads. Calling it twice is allowed."""
        ...
