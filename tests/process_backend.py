"""A backend for tests: every worker in a process of its own, nothing shared, everything pickled both ways.

It stands for backends on other machines: `put` copies files to another place, functions travel by cloudpickle, and a
worker can be killed. Processes are forked from a server that has imported torch and transformers and computed nothing,
so that starting one takes a fraction of a second and no thread is lost in the fork. Workers end with this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import socket
import struct
import tempfile
import traceback
from collections.abc import Mapping
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import cloudpickle

from mrl import registry
from mrl.backends import base
from mrl.backends.base import Resources
from mrl.errors import ConfigError, WorkerDied
from mrl.system.threads import SerialExecutor

_SIZE = struct.Struct(">Q")
_context: ForkServerContext | None = None


# --- this side --------------------------------------------------------------------------------------------------------


class ProcessHandle:
    """A worker's process, and the socket to it."""

    def __init__(self, name: str, process: Any, connection: socket.socket, timeout: float) -> None:
        self.name, self.process, self.timeout = name, process, timeout
        self.connection = connection
        self.numbers = itertools.count()
        self.waiting: dict[int, asyncio.Future[Any]] = {}
        self.gone: str | None = None
        """Why it does not answer any more."""
        self.reading: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        return self.process.pid

    async def start(self, worker: type, args: dict[str, Any]) -> None:
        self.reader, self.writer = await asyncio.open_connection(sock=self.connection, limit=1 << 30)
        self.reading = asyncio.create_task(self._read())
        await self.call("", _registrations(), worker, args)

    async def call(self, method: str, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        if self.gone is not None:
            raise WorkerDied(f"{self.name}: {self.gone} and cannot answer {method}()", self.name)
        seconds = self.timeout if timeout is None else timeout
        number, answer = next(self.numbers), asyncio.get_running_loop().create_future()
        self.waiting[number] = answer
        try:
            self._send(number, (method, args, kwargs))
            try:
                await asyncio.wait({answer}, timeout=seconds)
            except asyncio.CancelledError:
                await self._cancel(number)
                raise
            if answer.done():
                return self._result(answer, method)
            running = await self._cancel(number)
            self.gone = self.gone or "missed a deadline"
            behind = f" (it waited for {running}(), which still runs)" if running not in (None, method) else ""
            raise WorkerDied(
                f"{self.name}: {method}() did not finish in {seconds:.0f} s{behind}; raise call_timeout if it needs "
                "longer",
                self.name,
            )
        finally:
            self.waiting.pop(number, None)

    def _result(self, answer: asyncio.Future[Any], method: str) -> Any:
        kind, value = answer.result()
        if kind in ("died", "cancelled"):
            raise WorkerDied(f"{self.name}: {self.gone or 'gave up'} during {method}()", self.name)
        if kind == "raised":
            raise value
        return value

    async def _cancel(self, number: int) -> str | None:
        """Have the worker give up a call. Returns once it has: what it is in then, which cannot be given up."""
        answer = self.waiting[number]
        if answer.done() or self.gone is not None:
            return None
        self._send(number, None)
        await asyncio.wait({answer}, timeout=base.ENDING_SECONDS)
        return answer.result()[1] if answer.done() and answer.result()[0] == "cancelled" else None

    def _send(self, number: int, content: Any) -> None:
        try:
            data = cloudpickle.dumps((number, content))
        except Exception as error:
            raise ConfigError(f"{self.name}: {content[1]} cannot be sent to a process of its own: {error}") from error
        self.writer.write(_SIZE.pack(len(data)) + data)

    async def _read(self) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                number, answer = cloudpickle.loads(await _frame(self.reader))
                if number in self.waiting and not self.waiting[number].done():
                    self.waiting[number].set_result(answer)
        self._end("its process died")

    def _end(self, why: str) -> None:
        self.gone = self.gone or why
        for answer in self.waiting.values():
            if not answer.done():
                answer.set_result(("died", None))

    async def kill(self) -> None:
        """Lets the worker close itself, for a moment."""
        if self.gone is None:
            with contextlib.suppress(WorkerDied, Exception):
                await self.call("close", timeout=base.ENDING_SECONDS)
        self._end("was ended")
        if self.reading is not None:
            self.reading.cancel()
            self.writer.close()
        self.process.kill()
        while self.process.is_alive():  # not `join`, which would hold up the loop
            await asyncio.sleep(0.001)

    async def alive(self) -> bool:
        return self.gone is None and self.process.is_alive()


class ProcessBackend:
    """delay: seconds that every start of a worker takes longer, as where machines are rented."""

    shares_memory = False

    def __init__(self, call_timeout: float, delay: float = 0.0) -> None:
        self.call_timeout, self.delay = call_timeout, delay
        self.handles: list[ProcessHandle] = []
        self.copies: dict[Path, str] = {}
        self.folder: Path | None = None

    @staticmethod
    def check(resources: list[Resources], delay: float = 0.0) -> None:
        """Whatever is asked for, there is this machine."""

    async def spawn(self, worker: type, *, name: str, resources: Resources, args: dict[str, Any]) -> ProcessHandle:
        await asyncio.sleep(self.delay)
        here, there = socket.socketpair()
        with there:
            process = context().Process(target=serve, args=(there, dict(resources.env), name), name=name, daemon=True)
            process.start()
        handle = ProcessHandle(name, process, here, self.call_timeout)
        self.handles.append(handle)
        await handle.start(worker, args)
        return handle

    async def put(self, path: Path) -> str:
        if path not in self.copies:
            self.folder = self.folder or Path(tempfile.mkdtemp(prefix="mrl-elsewhere-"))
            target = self.folder / str(len(self.copies)) / path.name
            target.parent.mkdir()
            (shutil.copytree if path.is_dir() else shutil.copyfile)(path, target)
            self.copies[path] = str(target)
        return self.copies[path]

    async def close(self) -> None:
        await asyncio.gather(*(handle.kill() for handle in self.handles))
        self.handles.clear()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def _registrations() -> list[tuple[str, str, bytes]]:
    """What was registered in this process and can travel: who asks for another one is told that it is not there."""
    found = []
    for kind, members in registry.registrations().items():
        for name, member in members.items():
            with contextlib.suppress(Exception):
                found.append((kind, name, cloudpickle.dumps(member)))
    return found


def context() -> ForkServerContext:
    """Of processes that are forked from the server, which is started when it is first needed."""
    global _context
    if _context is None:
        _context = multiprocessing.get_context("forkserver")
        _context.set_forkserver_preload(["tests.preloaded"])
    return _context


# --- the worker's side ------------------------------------------------------------------------------------------------


def serve(connection: socket.socket, env: Mapping[str, str], name: str) -> None:
    """The process's life: answers calls until this end of the socket is the last."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to workers as well, and the run decides
    os.environ.update(env)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_Served(connection, name).run())
    os._exit(0)  # what still runs on threads is of no use to anybody


class _Served:
    """Asynchronous methods run side by side on the event loop, blocking ones in turn on a thread."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        self.connection = connection
        self.worker: Any = None
        self.blocking = SerialExecutor(f"mrl-{name}")
        self.calls: dict[int, asyncio.Task[None]] = {}

    async def run(self) -> None:
        reader, self.writer = await asyncio.open_connection(sock=self.connection, limit=1 << 30)
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                self._take(*cloudpickle.loads(await _frame(reader)))

    def _take(self, number: int, content: Any) -> None:
        """Begin a call, or give it up."""
        if content is not None:
            self.calls[number] = asyncio.create_task(self._answer(number, *content))
            self.calls[number].add_done_callback(lambda _: self.calls.pop(number))
        elif number in self.calls:
            self.calls[number].cancel()

    async def _answer(self, number: int, method: str, args: Any, kwargs: Any) -> None:
        try:
            answer = ("returned", await self._call(method, args, kwargs))
        except asyncio.CancelledError:
            answer = ("cancelled", self.blocking.running)
        except BaseException as error:
            answer = ("raised", _that_travels(error))
        try:
            data = cloudpickle.dumps((number, answer))
        except Exception as error:
            data = cloudpickle.dumps(
                (number, ("raised", TypeError(f"{method}() returned what cannot travel: {error}")))
            )
        self.writer.write(_SIZE.pack(len(data)) + data)

    async def _call(self, method: str, args: Any, kwargs: Any) -> Any:
        if not method:
            registered, worker, arguments = args
            for kind, name, member in registered:
                registry.adopt({kind: {name: cloudpickle.loads(member)}})
            self.worker = worker(**arguments)
            return None
        if method == "close" and not hasattr(self.worker, "close"):
            return None
        bound = getattr(self.worker, method)
        if asyncio.iscoroutinefunction(bound):
            return await bound(*args, **kwargs)
        return await asyncio.wrap_future(self.blocking.submit(method, lambda: bound(*args, **kwargs)))


def _that_travels(error: BaseException) -> BaseException:
    """The error, if it comes out of a pickle as it went in, else one that says what it was."""
    lines = "".join(traceback.format_exception(error))
    try:
        copied = cloudpickle.loads(cloudpickle.dumps(error))
        if type(copied) is not type(error) or str(copied) != str(error):
            raise TypeError("it changed")
    except Exception as problem:
        error = RuntimeError(f"{type(error).__name__}: {error} (the error itself does not travel: {problem})")
    error.add_note(f"in the worker:\n{lines}")
    return error


async def _frame(reader: asyncio.StreamReader) -> bytes:
    (size,) = _SIZE.unpack(await reader.readexactly(_SIZE.size))
    return await reader.readexactly(size)
