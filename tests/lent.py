"""One running vLLM for many tests: to start one takes longer than most of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from torch import nn

from mrl.config import ModelConfig
from mrl.engines import ENGINES
from mrl.engines.vllm.engine import VLLMEngine


class Lent(VLLMEngine):
    """An engine around a vLLM that others use as well; whoever has it sends it weights before anything else, as runs
    do."""

    lender: VLLMEngine

    @classmethod
    def create(cls, config: ModelConfig, module: nn.Module | None = None, **options: Any) -> Self:
        engine = cls.__new__(cls)
        engine.__dict__.update(cls.lender.__dict__)
        return engine

    def close(self) -> None:
        """Whoever lends it does."""


@contextmanager
def lent(lender: VLLMEngine, *kinds: type, **attributes: Any) -> Iterator[str]:
    """The name of an engine that is this vLLM for as long as this lasts. kinds: classes around it, such as one that
    plants a fault; the last of them a `Lent`, which is what there is without any."""
    name = f"lent-{id(attributes)}"
    ENGINES.register(name)(type("Lent", kinds or (Lent,), {"lender": lender, **attributes}))
    try:
        yield name
    finally:
        ENGINES._registered.pop(name)
