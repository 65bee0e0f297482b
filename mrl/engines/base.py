"""The interface of an engine: one policy on one set of devices. Token ids in, token ids out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, Self

from mrl.types import Completion, GenerateRequest, TokenSequence, WeightRef

if TYPE_CHECKING:
    from torch import Tensor, nn

    from mrl.config import ModelConfig


class Engine(Protocol):
    """Implemented once per backend in this package.

    Optional: a static method `check(**options)`, which raises ConfigError before a run starts if the machine lacks
    something (`create` gets the same options); `takes_images`, True where requests may have `media`; `async
    sampled_tokens()`, the tokens sampled since the engine was
    created, for progress displays.
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
        logits that are not finite, images for an engine that takes none) gets a completion with the reason "error"; the
        others are not affected. Raises EngineError when nothing can be served: closed, without weights; EngineDied.
        """
        ...

    async def logprobs(self, sequences: list[TokenSequence]) -> list[list[float]]:
        """Logprob of every completion token at the sequence's temperature (no top-p, top-k, min-p)."""
        ...

    def load_weights(self, ref: WeightRef) -> int:
        """Make `ref` the active policy and return its version. Raises SyncError; the old weights are then unchanged."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """The served tensors under their Hugging Face names."""
        ...

    def close(self) -> None:
        """Free devices and threads. Calling it twice is allowed."""
        ...
