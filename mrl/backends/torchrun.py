"""The actor's processes under torchrun, for the backend `inline`.

Either this process starts torchrun, whose processes connect to it; or it was itself started by torchrun with others, as
in `torchrun --nproc-per-node 4 -m mrl train ...`: then the first of them runs the loop, and each of the others is one
of the actor's processes (`take_part`). The first one's is a process of its own beside the loop's.

Whoever connects shows a secret: what is sent on afterwards is pickled. Not encrypted: for private networks.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import hmac
import json
import os
import secrets
import signal
import socket
import sys
import time
from typing import Any, NoReturn

from mrl.backends import sockets
from mrl.backends.sockets import SocketLink
from mrl.errors import ConfigError, WorkerDied
from mrl.system.machine import machine_id, own_address

DRIVER = "MRL_DRIVER"
"""Environment variable of processes started here: address, port and secret of the process that runs the loop."""
_STORE_KEY = "mrl/driver"
_STORE_SECONDS = 60.0
_GREETING_BYTES, _GREETING_SECONDS = 4096, 10.0
_EXIT_SECONDS = 5.0
"""How long a process may take to end once its connection is closed."""


def world_size() -> int:
    """How many processes were started by torchrun with this one; 1 = torchrun did not start it."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1


def take_part() -> None:
    """At the beginning of a program that trains: under torchrun all but the first process leave it here, and take their
    part in training until the run is over."""
    if world_size() > 1:
        store = _store()
        if os.environ["RANK"] != "0":
            _follow(store)


def _follow(store: Any) -> NoReturn:
    """Be one of the actor's processes until the run is over, and exit."""
    while not store.check([_STORE_KEY]):
        time.sleep(0.2)
    driver = store.get(_STORE_KEY).decode()
    if driver:
        be_rank(driver)
    sys.exit(0)  # the run ended before it needed any


def be_rank(driver: str) -> NoReturn:
    """Connect to the process that runs the loop, answer its calls until it closes the connection, and exit. driver: as
    in `DRIVER`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to everybody, and the run decides
    address, port, secret = driver.split(" ")
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # the ranks meet where rank 0 says
    rank = int(os.environ["RANK"])
    connection = socket.create_connection((address, int(port)))
    greeting = {"secret": secret, "rank": rank, "pid": os.getpid(), "machine": machine_id()}
    connection.sendall(json.dumps(greeting).encode() + b"\n")
    asyncio.run(sockets.serve(connection, f"actor-{rank}"))
    os._exit(0)  # what still runs on threads is of no use to anybody


class RankLink(SocketLink):
    """The connection to one process. greeting: what it said of itself."""

    def __init__(self, connection: socket.socket, greeting: dict[str, Any]) -> None:
        super().__init__(f"actor-{greeting['rank']}", connection)
        self.pid: int | None = greeting["pid"] if greeting["machine"] == machine_id() else None

    async def end(self) -> None:
        """Close the connection, which ends the process, or kill it where it is on this machine."""
        await super().end()
        pid, self.pid = self.pid, None
        end = time.monotonic() + _EXIT_SECONDS
        while pid is not None and _exists(pid):
            if time.monotonic() > end:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.01)


class Torchrun:
    """`size` processes under torchrun, started when the first is asked for."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.arrived: list[asyncio.Future[RankLink]] = []
        self.process: asyncio.subprocess.Process | None = None
        self.tasks: list[asyncio.Task[None]] = []
        self.links: list[RankLink] = []
        self.listener: socket.socket | None = None

    async def link(self, rank: int) -> RankLink:
        """The connection to a process. Raises WorkerDied."""
        if not self.arrived:
            self.arrived = [asyncio.get_running_loop().create_future() for _ in range(self.size)]
            await self._start()
        return await self.arrived[rank]

    async def close(self) -> None:
        """End the processes."""
        for link in self.links:
            await link.end()
        if self.process is not None:
            try:
                await asyncio.wait_for(self.process.wait(), _EXIT_SECONDS)
            except TimeoutError:
                self.process.kill()
                await self.process.wait()
        for task in self.tasks:
            task.cancel()
        if self.listener is not None:
            self.listener.close()

    async def _start(self) -> None:
        outer = world_size()
        self.listener = socket.create_server(("" if outer > 1 else "127.0.0.1", 0))
        self.listener.setblocking(False)
        self.secret = secrets.token_hex(32)
        address, port = own_address() if outer > 1 else "127.0.0.1", self.listener.getsockname()[1]
        driver = f"{address} {port} {self.secret}"
        self.tasks = [asyncio.create_task(self._accept(self.listener))]
        program = ["-m", "mrl.backends.rank"]
        if outer > 1:
            _store().set(_STORE_KEY, driver)
            command = [sys.executable, *program]  # this one's own; the others are there
        else:
            # `--standalone` chooses a port: two runs on one machine would not get along with the default.
            there = ["--standalone", "--nnodes=1", f"--nproc-per-node={self.size}", "--max-restarts=0"]
            command = [sys.executable, "-m", "torch.distributed.run", *there, *program]
        threads = str(max(1, (os.cpu_count() or 1) // self.size))
        env = {"OMP_NUM_THREADS": threads} | os.environ | {DRIVER: driver}
        self.process = await asyncio.create_subprocess_exec(*command, env=env, start_new_session=True)
        self.tasks.append(asyncio.create_task(self._watch(self.process)))

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        for rank, arrival in enumerate(self.arrived):
            if not arrival.done():
                arrival.set_exception(
                    WorkerDied(f"actor: torchrun ended with exit code {code} before process {rank} was there", "actor")
                )

    async def _accept(self, listener: socket.socket) -> None:
        greeting = set[asyncio.Task[None]]()
        while True:
            connection, _ = await asyncio.get_running_loop().sock_accept(listener)
            task = asyncio.create_task(self._greet(connection))
            greeting.add(task)
            task.add_done_callback(greeting.discard)

    async def _greet(self, connection: socket.socket) -> None:
        """A connection that does not show the secret is closed, and changes nothing."""
        loop, said = asyncio.get_running_loop(), b""
        try:
            connection.setblocking(False)
            async with asyncio.timeout(_GREETING_SECONDS):
                while not said.endswith(b"\n") and len(said) < _GREETING_BYTES:
                    part = await loop.sock_recv(connection, 1)  # what follows belongs to the calls
                    if not part:
                        break
                    said += part
            greeting = json.loads(said)
            known = hmac.compare_digest(str(greeting["secret"]).encode(), self.secret.encode())
            arrival = self.arrived[greeting["rank"]] if known else None
        except (OSError, ValueError, KeyError, TypeError, IndexError, TimeoutError):
            arrival = None
        if arrival is None or arrival.done():
            connection.close()
            return
        self.links.append(RankLink(connection, greeting))
        arrival.set_result(self.links[-1])


def check_size(size: int) -> None:
    """Raise ConfigError where torchrun has started another number of processes than the actor is to have."""
    if world_size() not in (1, size):
        raise ConfigError(
            f"actor_gpu: {size} processes are to train, and torchrun has started {world_size()}; leave actor_gpu out, "
            f"or use torchrun with {size} in all"
        )


@functools.cache
def _store() -> Any:
    """What torchrun's processes tell each other with; kept by torchrun itself, or by the first of them."""
    from datetime import timedelta

    from torch.distributed import TCPStore

    mine = os.environ["RANK"] == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=mine,
        timeout=timedelta(seconds=_STORE_SECONDS),
        wait_for_workers=False,
    )
    if os.environ["RANK"] == "0":
        atexit.register(_let_go, store)
    return store


def _let_go(store: Any) -> None:
    """As this process ends: let the others end too, should they still wait to be told."""
    with contextlib.suppress(Exception):  # they may be gone, and the store with them
        if not store.check([_STORE_KEY]):
            store.set(_STORE_KEY, "")


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
