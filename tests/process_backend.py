"""A backend for tests: every worker in a process of its own, nothing shared, everything pickled both ways.

It stands for backends on other machines: `put` copies files to another place, functions travel by cloudpickle, and a
worker can be killed. Processes are forked from a server that has imported torch and transformers and computed nothing,
so that starting one takes a fraction of a second and no thread is lost in the fork. Workers end with this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import multiprocessing
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Mapping
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from mrl.backends import sockets
from mrl.backends.base import Resources, WorkerHandle
from mrl.backends.remote import RemoteHandle
from mrl.backends.sockets import SocketLink

_context: ForkServerContext | None = None


class ProcessLink(SocketLink):
    """A worker's process, and the socket to it."""

    def __init__(self, name: str, process: Any, connection: socket.socket) -> None:
        super().__init__(name, connection)
        self.process = process

    async def end(self) -> None:
        await super().end()
        self.process.kill()
        while self.process.is_alive():  # not `join`, which would hold up the loop
            await asyncio.sleep(0.001)

    async def alive(self) -> bool:
        return await super().alive() and self.process.is_alive()


class ProcessHandle(RemoteHandle):
    """A worker whose process tests can look at."""

    link: ProcessLink

    @property
    def process(self) -> Any:
        return self.link.process

    @property
    def pid(self) -> int:
        return self.process.pid


class ProcessBackend:
    """delay: seconds that every start of a worker takes longer, as where machines are rented. hidden: a folder that
    workers find empty, as on another machine; root only. They have a disk in common all the same, without it."""

    shares_memory = False
    common_disk = True

    def __init__(self, call_timeout: float, delay: float = 0.0, hidden: str | None = None) -> None:
        self.call_timeout, self.delay, self.hidden = call_timeout, delay, hidden
        self.shares_disk = hidden is None
        self.sync_method = "reload" if self.shares_disk else "volume"
        self.reserved: dict[str, Resources] = {}
        self.handles: list[ProcessHandle] = []
        self.copies: dict[Path, str] = {}
        self.elsewhere: Path | None = None

    @staticmethod
    def check(resources: list[Resources], delay: float = 0.0, hidden: str | None = None) -> None:
        """Whatever is asked for, there is this machine."""

    def price(self, name: str, resources: Resources) -> None:
        """This machine is there anyway."""

    def spent(self) -> None:
        """Nothing that is known here."""

    async def reserve(self, workers: Mapping[str, Resources]) -> None:
        self.reserved = dict(workers)

    async def spawn(self, worker: type, *, name: str, resources: Resources, args: dict[str, Any]) -> ProcessHandle:
        await asyncio.sleep(self.delay)
        here, there = socket.socketpair()
        with there:
            process = context().Process(
                target=serve, args=(there, dict(resources.env), name, self.hidden), name=name, daemon=True
            )
            process.start()
        handle = ProcessHandle(name, link := ProcessLink(name, process, here), self.call_timeout)
        self.handles.append(handle)
        await link.open()
        await handle.start(worker, args)
        return handle

    async def put(self, path: Path) -> str:
        if path not in self.copies:
            target = self._elsewhere() / str(len(self.copies)) / path.name
            target.parent.mkdir()
            (shutil.copytree if path.is_dir() else shutil.copyfile)(path, target)
            self.copies[path] = str(target)
        return self.copies[path]

    def folder(self, run_dir: Path, name: str) -> str:
        return str((run_dir if self.shares_disk else self._elsewhere() / "run") / name)

    async def fetch(self, worker: WorkerHandle, there: str, here: Path) -> None:
        if not self.shares_disk:
            shutil.copytree(there, here.with_name(f"{here.name}.partial"))
            here.with_name(f"{here.name}.partial").rename(here)

    def scorers(self) -> ProcessBackend:
        return self

    def takes_loop(self, reward_funcs: Any) -> bool:
        return False

    async def close(self) -> None:
        await asyncio.gather(*(handle.kill() for handle in self.handles))
        self.handles.clear()
        if self.elsewhere is not None:
            shutil.rmtree(self.elsewhere, ignore_errors=True)

    def _elsewhere(self) -> Path:
        self.elsewhere = self.elsewhere or Path(tempfile.mkdtemp(prefix="mrl-elsewhere-"))
        return self.elsewhere


def context() -> ForkServerContext:
    """Of processes that are forked from the server, which is started when it is first needed."""
    global _context
    if _context is None:
        _context = multiprocessing.get_context("forkserver")
        _context.set_forkserver_preload(["tests.preloaded"])
    return _context


def serve(connection: socket.socket, env: Mapping[str, str], name: str, hidden: str | None) -> None:
    """The process's life: answers calls until this end of the socket is the last."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to workers as well, and the run decides
    os.environ.update(env)
    if hidden is not None:
        _hide(hidden)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(sockets.serve(connection, name))
    os._exit(0)  # what still runs on threads is of no use to anybody


def _hide(folder: str) -> None:
    """From this process, by an empty file system of its own that is mounted over it."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_namespace, private = 0x00020000, 0x40000 | 0x4000  # CLONE_NEWNS; MS_PRIVATE | MS_REC
    for call in (
        lambda: libc.unshare(new_namespace),
        lambda: libc.mount(b"none", b"/", None, private, None),
        lambda: libc.mount(b"none", folder.encode(), b"tmpfs", 0, None),
    ):
        if call():
            raise OSError(ctypes.get_errno(), f"cannot hide {folder}")
