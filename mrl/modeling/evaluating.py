"""Apart from the forward pass, whose attention brings most of transformers: a run's loop needs only this."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """The model is in evaluation mode inside: no dropout, no gradient checkpointing."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
