"""Rollouts that are made again after an error that may pass (a test's `exception_handler_config`)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx

from mrl.errors import EngineError, EnvError

T = TypeVar("T")
PASSING: tuple[type[Exception], ...] = (
    ConnectionError,
    TimeoutError,
    OSError,
    httpx.TransportError,
    EngineError,
    EnvError,
)
"""Errors after which another try may do better."""


@dataclass
class BackoffConfig:
    """How long to wait, and how often to try."""

    strategy: str = "expo"
    """`expo`: base_delay, then factor times as long each time; `constant`: base_delay."""
    base_delay: float = 1.0
    """Seconds."""
    max_delay: float = 60.0
    max_tries: int = 3
    jitter: Callable[[float], float] | None = None
    """Makes another number of seconds of each."""
    factor: float = 2.0
    raise_on_giveup: bool = True
    """Whatever it says, a rollout that fails in the end is kept with its error, and is not scored."""
    giveup_func: Callable[[Exception], bool] = lambda error: False
    """Of an error: whether to try no more."""


@dataclass
class ExceptionHandlerConfig:
    """Which errors, and how to deal with them."""

    retryable_exceptions: Any = field(default_factory=lambda: set(PASSING))
    backoff_config: BackoffConfig = field(default_factory=BackoffConfig)


async def tried_again(make: Callable[[], Awaitable[T]], config: Any) -> T:
    """What `make` comes to, at the first try that raises nothing. config: an ExceptionHandlerConfig, or Eval
    Protocol's; None = one try. Raises the last try's error."""
    if config is None:
        return await make()
    kinds, backoff = tuple(config.retryable_exceptions), config.backoff_config
    tries = 0
    while True:
        tries += 1
        try:
            return await make()
        except kinds as error:
            if tries >= backoff.max_tries or backoff.giveup_func(error):
                raise
            grown = backoff.base_delay * (backoff.factor ** (tries - 1) if backoff.strategy == "expo" else 1)
            wait = min(grown, backoff.max_delay)
        await asyncio.sleep(wait if backoff.jitter is None else backoff.jitter(wait))
