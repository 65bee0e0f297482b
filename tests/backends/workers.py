"""Workers that backends are tried with: module-level, so that any process can import them."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

from mrl.errors import ConfigError, WorkerDied


class Odd(Exception):
    """One that pickle cannot make again from its arguments."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


class Worker:
    """Blocking and asynchronous methods of every kind. log: file to which it writes what happens to it."""

    def __init__(self, start: int = 0, log: str | None = None) -> None:
        if start < 0:
            raise ConfigError("start: is below 0")
        self.value, self.log = start, log
        self.computing = threading.Lock()

    def add(self, n: int) -> int:
        self.value += n
        return self.value

    async def add_async(self, n: int) -> int:
        return self.add(n)

    def echo(self, value: Any) -> Any:
        return value

    def apply(self, function: Any, *values: Any) -> Any:
        return function(*values)

    def pid(self) -> int:
        return os.getpid()

    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    def read(self, path: str) -> str:
        return Path(path).read_text()

    def sleep(self, seconds: float) -> None:
        assert self.computing.acquire(blocking=False), "two blocking calls at once"
        self._note("began")
        time.sleep(seconds)
        self._note("ended")
        self.computing.release()

    async def wait(self, seconds: float) -> None:
        self._note("began")
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self._note("cancelled")
            raise
        self._note("ended")

    async def meet(self, others: int) -> int:
        """Returns when so many calls of it are under way."""
        self.value += 1
        while self.value < others:
            await asyncio.sleep(0.001)
        return self.value

    def fail(self, error: BaseException) -> None:
        raise error

    def fail_oddly(self) -> None:
        raise Odd("odd", "one")

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def death(self) -> None:
        raise WorkerDied("other: is gone", "other")

    def close(self) -> None:
        self._note("closed")

    def _note(self, what: str) -> None:
        if self.log is not None:
            with Path(self.log).open("a") as file:
                file.write(f"{what}\n")


class Scorer:
    """A reward worker that gives each row its length, and dies when `deaths` names its rows' first one.

    deaths: a file with a number, of how many more times it does.
    """

    def __init__(self, name: str, deaths: str | None = None) -> None:
        self.name, self.deaths = name, deaths

    async def score(self, requests: list[Any], state: Any) -> Any:
        from mrl.rewards.base import RewardReport, RewardResult

        if self.deaths is not None and requests[0].rollout_id.startswith("deadly"):
            left = int(Path(self.deaths).read_text())
            Path(self.deaths).write_text(str(left - 1))
            if left > 0:
                os.kill(os.getpid(), signal.SIGKILL)
        results = [RewardResult(float(len(r.completion)), extra={"by": self.name}) for r in requests]
        return RewardReport(results, {"rows": float(len(requests)), "step": float(state.global_step)})


class Drawer:
    """A reward function of a class: draws random numbers."""

    name = "drawer"

    async def score(self, requests: list[Any], *, trainer_state: Any) -> Any:
        import numpy

        from mrl.rewards.base import Scores

        return Scores([random.random() + float(numpy.random.rand()) for _ in requests])


class Rank:
    """One of several that compute together, with gloo."""

    def __init__(self, rank: int, world: int, store: str) -> None:
        self.rank, self.world, self.store = rank, world, store

    def join(self) -> None:
        from datetime import timedelta

        import torch.distributed as dist

        dist.init_process_group(
            "gloo",
            init_method=f"file://{self.store}",
            rank=self.rank,
            world_size=self.world,
            timeout=timedelta(seconds=60),
        )

    def total(self, number: float, fails: int | None = None, dies: int | None = None) -> tuple[int, float]:
        """The sum over ranks of `number` + rank; the rank `fails` raises instead, `dies` is killed."""
        import torch
        import torch.distributed as dist

        if self.rank == fails:
            raise ConfigError("number: will not do")
        if self.rank == dies:
            os.kill(os.getpid(), signal.SIGKILL)
        tensor = torch.tensor(number + self.rank)
        dist.all_reduce(tensor)
        return self.rank, tensor.item()

    def refuse(self) -> None:
        raise ConfigError("number: is refused everywhere")

    def pid(self) -> int:
        return os.getpid()
