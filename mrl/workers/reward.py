"""The reward worker: rewards, their sandbox and their time-outs in one object that can live on any backend."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import random
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from mrl.errors import ConfigError
from mrl.rewards import check_columns, resolve_rewards
from mrl.rewards.base import RewardReport, RewardRequest
from mrl.rewards.combine import score_rows
from mrl.sandbox import make_factory
from mrl.sandbox.base import Limits, Sandbox
from mrl.types import derive_seed


class RewardWorker:
    """Scores rollouts. Every argument can be pickled; nothing is shared with other workers."""

    def __init__(
        self,
        reward_funcs: Any = None,
        reward_weights: list[float] | None = None,
        reward_timeout: float | None = 60.0,
        sandbox: str | Callable[[], Sandbox] = "auto",
        sandbox_limits: dict[str, Any] | None = None,
        sandbox_options: dict[str, Any] | None = None,
        seed: int | None = None,
        reward_processing_classes: Any = None,
    ) -> None:
        """reward_funcs: see `resolve_rewards`. reward_weights: one per reward, for a weighted sum instead of the mean.
        reward_timeout: seconds for one call of a reward function. sandbox: its name, or what makes one.
        sandbox_limits: fields of `Limits` by name. sandbox_options: arguments of the named sandbox. seed: of what
        functions draw from Python's and numpy's random numbers, for a worker in a process of its own: the same rollouts
        get the same draws from any of them. reward_processing_classes: tokenizers of models among the rewards. Raises
        RewardError, ConfigError and ModelError.
        """
        if reward_timeout is not None and not reward_timeout > 0:
            raise ConfigError(f"reward_timeout: {reward_timeout} is not a number of seconds above 0")
        self._make_sandbox = make_factory(sandbox, sandbox_options) if isinstance(sandbox, str) else sandbox
        self._sandbox: Sandbox | None = None
        self.rewards = resolve_rewards(
            reward_funcs,
            reward_weights,
            sandbox=self._get_sandbox,
            limits=make_limits(sandbox_limits),
            timeout=reward_timeout,
            processing_classes=reward_processing_classes,
        )
        self._weights, self._timeout, self._seed = reward_weights, reward_timeout, seed
        self._random_lock = asyncio.Lock()
        """With a seed, one call at a time: the generators are those of the whole process."""

    def open(self, folder: str | None) -> None:
        """Have the rewards get ready: models are loaded, caches opened. folder: the run's; one that is not on this
        machine counts as none. Raises ModelError and RewardError."""
        here = Path(folder) if folder is not None and Path(folder).is_dir() else None
        for reward in self.rewards:
            if get_ready := getattr(reward, "open", None):
                get_ready(here)

    def check_rows(self, rows: list[tuple[str, dict[str, Any]]]) -> None:
        """rows: task id and columns. Raises DataError naming the first task that a reward cannot score."""
        for reward in self.rewards:
            check = getattr(reward, "check_rows", None)
            if check is not None:
                check(rows)

    def check_columns(self, columns: list[str]) -> None:
        """Raises RewardError when a reward needs a dataset column that is not there."""
        check_columns(self.rewards, columns)

    def check_attempts(self, attempts: int) -> None:
        """Raises ConfigError when a reward needs more attempts at a held-out task."""
        for reward in self.rewards:
            if check := getattr(reward, "check_attempts", None):
                check(attempts)

    async def score(self, requests: list[RewardRequest], trainer_state: Any = None) -> RewardReport:
        """Score a batch. trainer_state: an object or a dict, handed to reward functions. Raises RewardError
        only when a reward breaks its contract; all else is in the report."""
        draws = not all(getattr(reward, "independent", False) for reward in self.rewards)
        async with self._random_lock if self._seed is not None and draws else contextlib.nullcontext():
            if self._seed is not None and requests:
                step = getattr(trainer_state, "global_step", 0)
                seed_generators(derive_seed(self._seed, "reward", step, requests[0].rollout_id))
            return await score_rows(
                self.rewards, requests, weights=self._weights, timeout=self._timeout, trainer_state=trainer_state
            )

    async def close(self) -> None:
        """End the sandbox, and whatever it runs, and rewards that hold something."""
        for reward in self.rewards:
            if close := getattr(reward, "close", None):
                closing = close()
                if inspect.isawaitable(closing):
                    await closing
        if self._sandbox is not None:
            await self._sandbox.close()

    def _get_sandbox(self) -> Sandbox:
        if self._sandbox is None:
            self._sandbox = self._make_sandbox()
        return self._sandbox


def seed_generators(seed: int) -> None:
    """Python's and numpy's global ones."""
    import numpy

    random.seed(seed)
    numpy.random.seed(seed % 2**32)


def make_limits(values: dict[str, Any] | None) -> Limits:
    """`Limits` with some fields replaced. Raises ConfigError naming the field and what would work."""
    known: dict[str, int | float] = {field.name: getattr(Limits(), field.name) for field in fields(Limits)}
    for name, value in (values or {}).items():
        if name not in known:
            raise ConfigError(f"sandbox_limits: {name!r} is no limit (known: {', '.join(known)})")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise ConfigError(f"sandbox_limits: {name} = {value!r} is not a number above 0 (default {known[name]})")
        if isinstance(known[name], int) and value != int(value):
            raise ConfigError(f"sandbox_limits: {name} = {value!r} is not a whole number (default {known[name]})")
    chosen: dict[str, Any] = {name: type(known[name])(value) for name, value in (values or {}).items()}
    return replace(Limits(), **chosen)
