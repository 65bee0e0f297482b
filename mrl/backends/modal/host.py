"""What lives in a container: one worker, or all ranks of an actor, each in a process of its own.

Light to import: what the worker computes with is imported with its class.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import cloudpickle

from mrl.backends.modal.cluster import Cluster, bring_there, rank_environment, start_rank, start_there
from mrl.backends.remote import Gone
from mrl.backends.served import START, Answer, Served
from mrl.backends.sockets import SocketLink
from mrl.system import shared_disk
from mrl.system.threads import in_thread

CONTROL_INPUTS = 8
"""Inputs that a container takes beside calls: to hold it, and to give calls up."""

ARRIVING_SECONDS = 600.0
"""How long a call waits for those that were sent before it: large ones take their time."""
LOST = ("gone", "its container is gone (preempted, recycled, or killed)")
"""What a container answers that has taken the place of another one."""


@dataclass(frozen=True)
class Call:
    """One call to a worker, as it travels. files: where those lie on the Volume that the caller has put there, by the
    path that workers know them under."""

    worker: str
    number: int
    method: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    files: Mapping[str, str]


class _Server(Protocol):
    """`Served` in this process, or the connection to one in another."""

    async def ask(self, number: int, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Answer: ...

    async def give_up(self, number: int) -> None: ...


class Host:
    """The workers of one container, or of a cluster of them, in each of which there is one: the first one's answers.
    Modal delivers inputs in any order, so each says which place it has among all.

    ranks: how many processes there are to be; 1 = the worker lives in this one.
    """

    def __init__(self, ranks: int, cluster: Cluster | None = None) -> None:
        self.ranks, self.cluster = ranks, cluster
        self.workers: dict[str, _Server] = {}
        self.begun = asyncio.Event()
        """Set once a worker was to be made here: a container that takes a lost one's place gets its inputs, but not
        this one."""
        self.copying = asyncio.Lock()
        self.brought: dict[int, set[str]] = {}
        """What other containers of the cluster have, by their number in it."""
        self.next_place = 0
        self.waiting: dict[int, asyncio.Future[None]] = {}

    async def answer(self, place: int, content: bytes, *, begins: bool) -> bytes:
        """Make a call, pickled; begins: it is a worker's first. Returns an Answer, or ("gone", why), pickled."""
        if begins:
            self.begun.set()
        elif not self.begun.is_set():
            return cloudpickle.dumps(LOST)
        if self.cluster is not None and self.cluster.own > 0:
            return b""
        try:
            await self._in_turn(place)
        except TimeoutError:  # what was before it was answered by another container
            return cloudpickle.dumps(LOST)
        try:
            async with self.copying:  # calls stay in order
                call: Call = cloudpickle.loads(content) if begins else await in_thread(cloudpickle.loads, content)
                await self._bring(call)
                server = await self._server(call)
        except Exception as error:
            return cloudpickle.dumps(("raised", RuntimeError(f"the call could not be made there: {error}")))
        if server is None:
            return cloudpickle.dumps(LOST)
        try:
            answer = await server.ask(call.number, call.method, call.args, call.kwargs)
        except Gone as error:
            return cloudpickle.dumps(("gone", str(error)))
        try:
            return cloudpickle.dumps(answer)
        except Exception as error:
            problem = TypeError(f"{call.method}() returned what cannot travel: {error}")
            return cloudpickle.dumps(("raised", problem))

    async def give_up(self, place: int, worker: str, number: int) -> None:
        """Cancel a call."""
        if self.begun.is_set() and (self.cluster is None or self.cluster.own == 0):
            with contextlib.suppress(TimeoutError):
                await self._in_turn(place)
            if worker in self.workers:
                with contextlib.suppress(Gone):
                    await self.workers[worker].give_up(number)

    async def hold(self, seconds: float) -> bool:
        """Keep the container for so long. False, at once, where none of its worker's calls came first."""
        if self.begun.is_set():
            await asyncio.sleep(seconds)
        return self.begun.is_set()

    # --- inner ------------------------------------------------------------------------------------------------------

    async def _in_turn(self, place: int) -> None:
        if place != self.next_place:
            turn = self.waiting[place] = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(ARRIVING_SECONDS):
                    await turn
            finally:
                del self.waiting[place]
        self.next_place = place + 1
        waiting = self.waiting.get(self.next_place)
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    async def _bring(self, call: Call) -> None:
        """Files where the worker is."""
        place = self._place(call.worker)
        if self.cluster is None or place == 0:
            await in_thread(bring_files, call.files)
            return
        brought = self.brought.setdefault(place, set())
        if missing := {path: source for path, source in call.files.items() if path not in brought}:
            await bring_there(self.cluster, place, missing)
            brought.update(missing)

    def _place(self, worker: str) -> int:
        """In which container of the cluster it lives."""
        return self.cluster.place(_rank(worker), self.ranks) if self.cluster is not None else 0

    async def _server(self, call: Call) -> _Server | None:
        if call.method == START:
            self.workers[call.worker] = Here(call.worker) if self.ranks == 1 else await self._start(call.worker)
        return self.workers.get(call.worker)

    async def _start(self, name: str) -> SocketLink:
        """A process for one rank."""
        rank = _rank(name)
        if self.cluster is not None and self._place(name) > 0:
            return await start_there(self.cluster, name, rank, self.ranks)
        here, there = socket.socketpair()
        nodes, address = (1, None) if self.cluster is None else (len(self.cluster.addresses), self.cluster.addresses[0])
        start_rank(name, rank_environment(rank, self.ranks, self.ranks // nodes, address), there)
        here.setblocking(False)
        link = SocketLink(name, here)
        await link.open()
        return link


class Here:
    """A worker in this process."""

    def __init__(self, name: str) -> None:
        self.served = Served(name)

    async def ask(self, number: int, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Answer:
        """See Served."""
        return await self.served.answer(number, method, args, kwargs)

    async def give_up(self, number: int) -> None:
        """See Served."""
        self.served.give_up(number)


def _rank(worker: str) -> int:
    """A rank's name ends with its number."""
    return int(worker.rpartition("-")[2])


def bring_files(files: Mapping[str, str]) -> None:
    """Copy from the Volume what is not here yet. Raises OSError."""
    for path, source in files.items():
        if os.path.exists(path):
            continue
        partial = f"{path}.{os.getpid()}.partial"
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if not shared_disk.bring(Path(source), Path(partial)):
            raise FileNotFoundError(f"{source} is not there")
        try:
            os.rename(partial, path)
        except OSError:
            if not os.path.exists(path):
                raise
