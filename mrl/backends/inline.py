"""`inline`: workers are objects in this process. The embedded default, and where a debugger works. Only an actor of
several GPUs has processes of its own, under torchrun."""

from __future__ import annotations

import asyncio
import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mrl.backends import base
from mrl.backends.base import Resources, WorkerHandle
from mrl.backends.remote import RemoteHandle
from mrl.backends.torchrun import Torchrun, check_size
from mrl.errors import ConfigError, WorkerDied
from mrl.system.gather import all_of
from mrl.system.threads import SerialExecutor

RANK, WORLD_SIZE = "RANK", "WORLD_SIZE"
"""Environment variables, as torchrun sets them, of a worker that is one of several."""


class InlineHandle:
    """A worker object. Its blocking methods run on another thread, one at a time: the event loop stays free.

    The thread ends when no call is left, and its share of torch's threads with it (see mrl.system.threads).
    """

    def __init__(self, worker: Any, name: str, timeout: float) -> None:
        self.worker: Any | None = worker
        self.name = name
        self.timeout = timeout
        self.blocking = SerialExecutor(f"mrl-{name}")
        self.asynchronous: set[asyncio.Task[Any]] = set()
        self.missed_deadline = False

    async def call(self, method: str, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        if self.worker is None:
            raise WorkerDied(f"{self.name}: was ended and cannot answer {method}()", self.name)
        seconds = self.timeout if timeout is None else timeout
        bound = getattr(self.worker, method)
        answer: asyncio.Future[Any]
        if inspect.iscoroutinefunction(bound):
            answer = asyncio.create_task(bound(*args, **kwargs))
            self.asynchronous.add(answer)
            answer.add_done_callback(self.asynchronous.discard)
        else:
            answer = asyncio.wrap_future(self.blocking.submit(method, functools.partial(bound, *args, **kwargs)))
        try:
            await asyncio.wait({answer}, timeout=seconds)
        except asyncio.CancelledError:
            await self._give_up(answer, method)
            raise
        if not answer.done():
            self.missed_deadline = True
            running = self.blocking.running
            await self._give_up(answer, method)
            raise WorkerDied(_missed(self.name, method, seconds, running, default=timeout is None), self.name)
        if answer.cancelled():
            raise WorkerDied(f"{self.name}: was ended during {method}()", self.name)
        return answer.result()

    async def _give_up(self, answer: asyncio.Future[Any], method: str) -> None:
        """Cancel what can be cancelled, and wait until it has ended: a blocking method goes on on its thread."""
        answer.cancel()
        await asyncio.wait({answer}, timeout=base.ENDING_SECONDS)
        if not answer.done():
            warnings.warn(
                f"{self.name}: {method}() still runs {base.ENDING_SECONDS:.0f} s after it was cancelled; left behind",
                RuntimeWarning,
                stacklevel=2,
            )
        elif not answer.cancelled():
            answer.exception()  # nobody asks for it any more

    async def kill(self) -> None:
        """Close the worker once its current call has ended, never during it. One that hangs is left behind, with a
        warning; it keeps neither its caller nor the process from ending."""
        worker, self.worker = self.worker, None
        if worker is None:
            return
        self.blocking.drop_waiting()
        ended: set[asyncio.Future[Any]] = {asyncio.wrap_future(self.blocking.submit("ending", _nothing))}
        for task in self.asynchronous:
            task.cancel()
        ended |= self.asynchronous
        close: Callable[[], Any] = getattr(worker, "close", _nothing)
        closed = None if inspect.iscoroutinefunction(close) else self.blocking.submit("close", close)
        _, running = await asyncio.wait(ended, timeout=base.ENDING_SECONDS)
        if running:
            warnings.warn(
                f"{self.name}: {self.blocking.running or 'a call'}() still runs {base.ENDING_SECONDS:.0f} s after its "
                "worker was ended; it is left behind, and the worker is closed when it returns, if ever",
                RuntimeWarning,
                stacklevel=2,
            )
        elif closed is None:
            await close()
        else:
            await asyncio.wrap_future(closed)

    async def alive(self) -> bool:
        return self.worker is not None and not self.missed_deadline


def _missed(name: str, method: str, seconds: float, running: str | None, *, default: bool) -> str:
    behind = f" (it waited for {running}(), which still runs)" if running not in (None, method) else ""
    advice = "; raise call_timeout if it needs longer" if default else ""
    return f"{name}: {method}() did not finish in {seconds:.0f} s{behind}{advice}"


def _nothing() -> None:
    """Its turn comes when what was before it has ended."""


class InlineBackend:
    """Everything in this process, on the device that is there."""

    shares_memory = shares_disk = common_disk = True
    sync_method = "reload"

    def __init__(self, call_timeout: float) -> None:
        self.call_timeout = call_timeout
        self.handles: list[WorkerHandle] = []
        self.torchrun: Torchrun | None = None

    @staticmethod
    def check(resources: list[Resources]) -> None:
        """Raises ConfigError for environment variables: this process has its own, which others read too; and for
        another number of the actor's processes than torchrun has started, where it has."""
        for needs in resources:
            if RANK in needs.env:
                check_size(int(needs.env[WORLD_SIZE]))
            elif needs.env:
                raise ConfigError(
                    f"backend: inline runs workers in this process, so {', '.join(needs.env)} cannot be set for one of "
                    "them; set it before the run"
                )

    def price(self, name: str, resources: Resources) -> None:
        """This machine is there anyway."""

    def spent(self) -> None:
        """Nothing that is known here."""

    async def reserve(self, workers: Mapping[str, Resources]) -> None:
        """Nothing: there is what is there."""

    async def spawn(self, worker: type, *, name: str, resources: Resources, args: dict[str, Any]) -> WorkerHandle:
        """One of several that do everything together, by its place in the environment, gets a process of its own."""
        if RANK in resources.env:
            return await self._spawn_rank(worker, name, resources.env, args)
        handle = InlineHandle(worker(**args), name, self.call_timeout)
        self.handles.append(handle)
        return handle

    async def _spawn_rank(self, worker: type, name: str, env: Mapping[str, str], args: dict[str, Any]) -> RemoteHandle:
        self.torchrun = self.torchrun or Torchrun(int(env[WORLD_SIZE]))
        link = await self.torchrun.link(int(env[RANK]))
        handle = RemoteHandle(name, link, self.call_timeout)
        self.handles.append(handle)
        await link.open()
        await handle.start(worker, args)
        return handle

    async def put(self, path: Path) -> str:
        return str(path)

    def folder(self, run_dir: Path, name: str) -> str:
        return str((run_dir / name).absolute())

    async def fetch(self, worker: WorkerHandle, there: str, here: Path) -> None:
        """Nothing: it is here."""

    def scorers(self) -> InlineBackend:
        return self

    def takes_loop(self, reward_funcs: Any) -> bool:
        return False

    async def close(self) -> None:
        await all_of([handle.kill() for handle in self.handles])
        self.handles.clear()
        if self.torchrun is not None:
            await self.torchrun.close()
