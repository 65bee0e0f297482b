"""Calls to a worker in a container."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Awaitable, Mapping
from types import SimpleNamespace
from typing import Any, TypeVar

import cloudpickle

from mrl.backends.modal.host import Call
from mrl.backends.modal.storage import Storage
from mrl.backends.remote import Gone
from mrl.backends.served import START, Answer
from mrl.errors import ConfigError

T = TypeVar("T")

HOLD_SECONDS = 60.0
"""How long a container is kept at a time. When nobody asks for more, Modal ends it `scaledown_window` later."""
UNREACHABLE_SECONDS = 120.0
"""How long Modal may not answer, as on a laptop that changes its network, before its containers count as lost."""
_ENDING_SECONDS, _RETRY_SECONDS = 10.0, 1.0


class Container:
    """One container of Modal's, with one worker or an actor's ranks in it.

    instance: of a class in mrl.backends.modal.app. inputs: calls that are there at a time. A container that dies is
    not followed by another: Modal starts one for the calls that were under way, which says that it is not the same.
    """

    def __init__(self, instance: Any, storage: Storage, inputs: int) -> None:
        self.instance, self.storage = instance, storage
        self.places = itertools.count()
        self.slots = asyncio.Semaphore(inputs)
        self.unsent: set[tuple[str, int]] = set()
        """Calls that wait for others to end, by worker and number."""
        self.sent = False
        self.binding, self.bound = asyncio.Lock(), False
        """Modal's client binds an instance to its parameters with the first call. Of two first calls at once each does,
        and each has a container of its own."""
        self.links: set[ModalLink] = set()
        self.gone: str | None = None
        self.ended = asyncio.Event()
        self.holding: asyncio.Task[None] | None = None
        self.held: Any = None

    async def ask(self, worker: str, number: int, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Raises Gone, and ConfigError for arguments that cannot be sent."""
        try:
            content = cloudpickle.dumps(Call(worker, number, method, args, kwargs, dict(self.storage.files)))
        except Exception as error:
            raise ConfigError(f"{worker}: {args} cannot be sent to a process of its own: {error}") from error
        key = (worker, number)
        self.unsent.add(key)
        async with self.slots:
            if key not in self.unsent:  # it was given up meanwhile
                return "cancelled", None
            self.unsent.remove(key)
            answer = await self._unless_gone(self._call(self.instance.answer, content, method == START))
        if method == START and self.holding is None:
            self.holding = asyncio.create_task(self._hold())
        return cloudpickle.loads(answer)

    async def give_up(self, worker: str, number: int) -> None:
        """Raises Gone."""
        if (worker, number) in self.unsent:
            self.unsent.remove((worker, number))
            return
        await self._unless_gone(self._call(self.instance.give_up, worker, number))

    async def end(self) -> None:
        """End it, whatever it does. Calling it twice is allowed."""
        self.lose("was ended")
        if self.holding is not None:
            self.holding.cancel()
        held, self.held = self.held, None
        sent, self.sent = self.sent, False
        with contextlib.suppress(Exception):
            async with asyncio.timeout(_ENDING_SECONDS):
                if held is not None:
                    await held.cancel.aio(terminate_containers=True)
                elif sent:
                    await self.instance.leave.spawn.aio()

    def lose(self, why: str) -> None:
        """It does not answer any more."""
        self.gone = self.gone or why
        self.ended.set()

    async def _call(self, method: Any, *args: Any) -> Any:
        """Gives the call its place, and sends it."""
        self.sent = True
        # Sent even when this task is cancelled: every place has to arrive.
        call = await asyncio.shield(asyncio.ensure_future(self._send(method, next(self.places), *args)))
        return await patiently(call)

    async def _send(self, method: Any, place: int, *args: Any) -> Any:
        if self.bound:
            return await method.spawn.aio(place, *args)
        async with self.binding:
            call = await method.spawn.aio(place, *args)
            self.bound = True
            return call

    async def _hold(self) -> None:
        """Keep it, and notice when it is gone."""
        while self.gone is None:
            try:
                self.held = await self.instance.hold.spawn.aio(HOLD_SECONDS)
                if not await patiently(self.held):
                    self.lose("its container is gone (preempted, recycled, or killed)")
            except Exception as error:
                self.lose(_why(error))

    async def _unless_gone(self, work: Awaitable[T]) -> T:
        """What Modal returns, unless the container is lost first: Modal may take its time."""
        asked = asyncio.ensure_future(work)
        if self.gone is not None:
            asked.cancel()
            raise Gone(self.gone)
        ended = asyncio.ensure_future(self.ended.wait())
        try:
            await asyncio.wait({asked, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                raise Gone(self.gone or "was ended")
            return asked.result()
        except Gone:
            raise
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self.lose(_why(error))
            raise Gone(self.gone or "") from error
        finally:
            for task in (asked, ended):
                task.cancel()


class OneMethod:
    """An instance of ActorCluster, which has one method, as one of the other classes, which have several."""

    def __init__(self, instance: Any) -> None:
        for name in ("answer", "give_up", "hold", "leave"):
            setattr(self, name, SimpleNamespace(spawn=_Named(instance.take, name)))


class _Named:
    def __init__(self, method: Any, name: str) -> None:
        self.method, self.name = method, name

    async def aio(self, *args: Any) -> Any:
        """Send it."""
        return await self.method.spawn.aio(self.name, args)


class ModalLink:
    """See Link."""

    def __init__(self, name: str, container: Container) -> None:
        self.name, self.container = name, container
        container.links.add(self)

    async def ask(self, number: int, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Answer:
        """See Link."""
        if self not in self.container.links:
            raise Gone("was ended")
        kind, value = await self.container.ask(self.name, number, method, args, kwargs)
        if kind == "gone":
            if len(self.container.links) == 1:
                self.container.lose(value)
            raise Gone(value)
        return kind, value

    async def give_up(self, number: int) -> None:
        """See Link."""
        await self.container.give_up(self.name, number)

    async def end(self) -> None:
        """See Link. A container ends with the last of its workers."""
        self.container.links.discard(self)
        if not self.container.links:
            await self.container.end()

    async def alive(self) -> bool:
        """Whether its container was there when Modal was last heard of."""
        return self.container.gone is None


async def patiently(call: Any) -> Any:
    """What a call of Modal's returns. Asked again for a while when Modal cannot be reached: the call goes on there."""
    import modal

    end = time.monotonic() + UNREACHABLE_SECONDS
    while True:
        try:
            return await call.get.aio()
        except (modal.exception.ConnectionError, ConnectionError):
            if time.monotonic() > end:
                raise
            await asyncio.sleep(_RETRY_SECONDS)


def _why(error: Exception) -> str:
    return f"its container is gone ({type(error).__name__}: {error})"
