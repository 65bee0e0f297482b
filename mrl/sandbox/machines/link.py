"""One machine in use: requests to its agent, and the answers by number."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from typing import Any

from mrl.errors import SandboxError
from mrl.sandbox.isolation import frames
from mrl.sandbox.machines.agent import MACHINE
from mrl.sandbox.machines.base import Machine, OpenMachine
from mrl.sandbox.machines.bundle import COMMAND

log = logging.getLogger("mrl.sandbox")
MAX_ANSWER = 64_000_000
"""Bytes; the agent's own limits keep an answer below it."""


class Link:
    """Used in one event loop. Nothing that comes from the machine is trusted further than as data."""

    def __init__(self, machine: Machine, slots: int) -> None:
        self.machine, self.slots = machine, slots
        self.layer = ""
        self.busy = 0
        self.lost: str | None = None
        """Why it is of no use any more."""
        self._waiting: dict[bytes, asyncio.Future[dict[str, Any]]] = {}
        self._hello: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._number = 0
        self._received = bytearray()
        self._sending = asyncio.Lock()
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def open(cls, open_machine: OpenMachine, slots: int, settings: bytes, seconds: float) -> Link:
        """A machine whose agent is ready. settings: `bundle.greeting`. Raises SandboxError."""
        try:
            async with asyncio.timeout(seconds):
                link = cls(await open_machine(COMMAND), slots)
                try:
                    await link._send(settings)
                    hello = await asyncio.shield(link._hello)
                    link.layer = str(hello["layer"])
                    if hello["reasons"]:
                        log.warning("sandbox: each machine is used for one program only: %s", hello["reasons"])
                except BaseException:
                    await link.close("it did not start")
                    raise
        except TimeoutError:
            raise SandboxError(f"sandbox: a machine was not ready within {seconds:.0f} s") from None
        except SandboxError:
            raise
        except Exception as error:  # whatever the service's library raises
            raise SandboxError(f"sandbox: a machine could not be started: {type(error).__name__}: {error}") from error
        return link

    @property
    def single(self) -> bool:
        """Whether one program is all it may run, because nothing on it separates the next from what that left."""
        return self.layer == MACHINE

    async def ask(self, request: bytes, seconds: float) -> dict[str, Any]:
        """Raises SandboxError when the machine is lost or silent."""
        if self.lost is not None:
            raise SandboxError(f"sandbox: a machine was lost: {self.lost}")
        self._number += 1
        number = f"{self._number:08d}".encode()
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(seconds):
                await self._send(frames.pack(b"x", number + request))
                return await answer
        except TimeoutError:
            await self.close(f"no answer within {seconds:.0f} s")
            raise SandboxError(f"sandbox: a machine did not answer within {seconds:.0f} s") from None
        finally:
            self._waiting.pop(number, None)

    async def close(self, reason: str) -> None:
        """Give the machine back; whoever waits for it gets a SandboxError. Safe to call twice."""
        if self.lost is None:
            self._lose(reason)
            self._reader.cancel()
            with contextlib.suppress(Exception):  # it may be gone already, and the service's errors are many
                await self.machine.stop()

    async def _send(self, data: bytes) -> None:
        try:
            async with self._sending:
                await self.machine.write(data)
        except Exception as error:
            await self.close(f"{type(error).__name__}: {error}")
            raise SandboxError(f"sandbox: a machine was lost: {type(error).__name__}: {error}") from None

    async def _read(self) -> None:
        try:
            while data := await self.machine.read():
                self._received += data
                self._take_messages()
            reason = "its command ended"
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        if self.lost is None:
            self._lose(reason)
            with contextlib.suppress(Exception):
                await self.machine.stop()

    def _take_messages(self) -> None:
        while len(self._received) >= frames.HEADER.size:
            size, kind = frames.HEADER.unpack_from(self._received)
            if size > MAX_ANSWER:
                raise ValueError("an answer that is too long")
            end = frames.HEADER.size + size
            if len(self._received) < end:
                return
            body = bytes(self._received[frames.HEADER.size : end])
            del self._received[:end]
            self._on_message(bytes([kind]), body)

    def _on_message(self, kind: bytes, body: bytes) -> None:
        if kind == b"f":
            raise SandboxError(body.decode(errors="replace"))
        if kind == b"h" and not self._hello.done():
            self._hello.set_result(json.loads(body))
        elif kind == b"o":
            waiting = self._waiting.get(body[:8])
            if waiting is not None and not waiting.done():
                waiting.set_result(json.loads(body[8:]))

    def _lose(self, reason: str) -> None:
        self.lost = reason
        for waiting in (self._hello, *self._waiting.values()):
            if not waiting.done():
                waiting.set_exception(SandboxError(f"sandbox: a machine was lost: {reason}"))
                waiting.exception()  # somebody may have stopped waiting: that is no news
