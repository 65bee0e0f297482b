"""Calls over a socket: one connection for each worker, frames of pickled objects both ways.

A pickle can run anything when it is read: a connection is made with a process that this one has started, or with one
that has shown the secret which this one gave it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Mapping
from typing import Any

import cloudpickle

from mrl.backends.remote import Gone
from mrl.backends.served import Answer, Served
from mrl.errors import ConfigError

_SIZE = struct.Struct(">Q")


class SocketLink:
    """The caller's end; `open` it first."""

    def __init__(self, name: str, connection: socket.socket) -> None:
        self.name, self.connection = name, connection
        self.waiting: dict[int, asyncio.Future[Answer]] = {}
        self.gone: str | None = None
        self.reading: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Begin to read answers."""
        self.reader, self.writer = await asyncio.open_connection(sock=self.connection)
        self.reading = asyncio.create_task(self._read())

    async def ask(self, number: int, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Answer:
        """See Link."""
        if self.gone is not None:
            raise Gone(self.gone)
        try:
            frame = _frame((number, (method, args, kwargs)))
        except Exception as error:
            raise ConfigError(f"{self.name}: {args} cannot be sent to a process of its own: {error}") from error
        answer = self.waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self.writer.write(frame)
            return await answer
        finally:
            del self.waiting[number]

    async def give_up(self, number: int) -> None:
        """See Link."""
        if self.gone is not None:
            raise Gone(self.gone)
        self.writer.write(_frame((number, None)))

    async def end(self) -> None:
        """Close the connection, which ends a worker behind `serve`."""
        self.lose("was ended")
        if self.reading is not None:
            self.reading.cancel()
            self.writer.close()

    async def alive(self) -> bool:
        """Whether the connection stands."""
        return self.gone is None

    def lose(self, why: str) -> None:
        """Nobody is at the other end any more."""
        self.gone = self.gone or why
        for answer in self.waiting.values():
            if not answer.done():
                answer.set_exception(Gone(self.gone))

    async def _read(self) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                number, answer = await _read_frame(self.reader)
                if number in self.waiting and not self.waiting[number].done():
                    self.waiting[number].set_result(answer)
        self.lose("its process died")


async def serve(connection: socket.socket, name: str) -> None:
    """The worker's end: answers calls until the caller's end is closed."""
    reader, writer = await asyncio.open_connection(sock=connection)
    served, answering = Served(name), set[asyncio.Task[None]]()

    async def answer(number: int, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        answered = await served.answer(number, method, args, kwargs)
        try:
            frame = _frame((number, answered))
        except Exception as error:
            problem = TypeError(f"{method}() returned what cannot travel: {error}")
            frame = _frame((number, ("raised", problem)))
        writer.write(frame)

    with contextlib.suppress(asyncio.IncompleteReadError, OSError):
        while True:
            number, content = await _read_frame(reader)
            if content is None:
                served.give_up(number)
                continue
            task = asyncio.create_task(answer(number, *content))
            answering.add(task)
            task.add_done_callback(answering.discard)


def _frame(content: Any) -> bytes:
    data = cloudpickle.dumps(content)
    return _SIZE.pack(len(data)) + data


async def _read_frame(reader: asyncio.StreamReader) -> Any:
    (size,) = _SIZE.unpack(await reader.readexactly(_SIZE.size))
    return cloudpickle.loads(await reader.readexactly(size))
