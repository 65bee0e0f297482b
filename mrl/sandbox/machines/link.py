"""One machine in use: requests to its agent, and the answers by number."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

from mrl.errors import SandboxError
from mrl.sandbox import protocol
from mrl.sandbox.machines.base import Machine, OpenMachine
from mrl.sandbox.machines.bundle import COMMAND
from mrl.sandbox.protocol import Kind

MAX_ANSWER = 64_000_000
"""Bytes; the agent's own limits keep an answer below it."""


class Unfit(SandboxError):
    """A machine on which nothing can be judged. Another of the same kind would not do either."""


class Link:
    """Used in one event loop. Nothing that comes from the machine is trusted further than as data."""

    def __init__(self, machine: Machine, slots: int) -> None:
        self.machine, self.slots = machine, slots
        self.layer = ""
        self.busy = 0
        self.lost: str | None = None
        """Why it is of no use any more."""
        self.unfit = ""
        """Why nothing can be judged there, in its own words."""
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
                except BaseException:
                    await link.close("it did not start")
                    if link.unfit:
                        raise Unfit(f"sandbox: {link.unfit}") from None
                    raise
        except TimeoutError:
            raise SandboxError(f"sandbox: a machine was not ready within {seconds:.0f} s") from None
        except SandboxError:
            raise
        except Exception as error:  # whatever the service's library raises
            raise SandboxError(f"sandbox: a machine could not be started: {type(error).__name__}: {error}") from error
        return link

    async def ask(self, request: bytes, seconds: float) -> dict[str, Any]:
        """Raises SandboxError when the machine is lost or silent."""
        if self.lost is not None:
            raise SandboxError(f"sandbox: a machine was lost: {self.lost}")
        self._number += 1
        number = f"{self._number:08d}".encode()
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(seconds):
                await self._send(protocol.pack(Kind.REQUEST, number + request))
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
        while (message := protocol.take(self._received, MAX_ANSWER)) is not None:
            self._on_message(*message)

    def _on_message(self, kind: Kind, body: bytes) -> None:
        if kind is Kind.NOT_READY:
            self.unfit = body.decode(errors="replace")
            raise SandboxError(self.unfit)
        if kind is Kind.HELLO and not self._hello.done():
            self._hello.set_result(json.loads(body))
        elif kind is Kind.OBSERVATION:
            waiting = self._waiting.get(body[:8])
            if waiting is not None and not waiting.done():
                waiting.set_result(json.loads(body[8:]))

    def _lose(self, reason: str) -> None:
        self.lost = reason
        for waiting in (self._hello, *self._waiting.values()):
            if not waiting.done():
                waiting.set_exception(SandboxError(f"sandbox: a machine was lost: {reason}"))
                waiting.exception()  # somebody may have stopped waiting: that is no news
