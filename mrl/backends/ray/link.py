"""Calls to a worker in a Ray actor."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

from mrl.backends.remote import Gone
from mrl.backends.served import Answer
from mrl.errors import ConfigError


class RayLink:
    """See Link. actor: Ray's handle of a `Host`."""

    def __init__(self, name: str, actor: Any) -> None:
        self.name, self.actor = name, actor
        self.sent = 0
        self.ending: asyncio.Event = asyncio.Event()
        self.gone: str | None = None

    async def ask(self, number: int, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Answer:
        """See Link. Arguments and answers go as Ray sends them, so that it counts references to objects in them."""
        from ray.exceptions import RayError, RayTaskError

        if self.gone is not None:
            raise Gone(self.gone)
        place = self.sent
        try:
            answer = self.actor.answer.remote(place, number, method, args, kwargs)
        except Exception as error:
            raise ConfigError(f"{self.name}: {args} cannot be sent to a process of its own: {error}") from error
        self.sent += 1
        try:
            return await self._unless_ended(answer)
        except RayTaskError as error:
            self.actor.skip.remote(place)
            what = getattr(error, "cause", None) or error
            return "raised", TypeError(f"{method}(): arguments or answer cannot travel: {what}")
        except RayError as error:
            self.gone = self.gone or why(error)
            raise Gone(self.gone) from None

    async def give_up(self, number: int) -> None:
        """See Link."""
        from ray.exceptions import RayError

        if self.gone is not None:
            raise Gone(self.gone)
        given_up = self.actor.give_up.remote(self.sent, number)
        self.sent += 1
        try:
            await self._unless_ended(given_up)
        except RayError as error:
            self.gone = self.gone or why(error)
            raise Gone(self.gone) from None

    async def end(self) -> None:
        """See Link. Whatever the actor does, its process is killed, and not started again."""
        import ray

        self.gone = self.gone or "was ended"
        self.ending.set()
        with contextlib.suppress(Exception):  # without a cluster there is no actor either
            ray.kill(self.actor, no_restart=True)

    async def alive(self) -> bool:
        """Whether it was there when it was last asked, and answers now."""
        from ray.exceptions import RayError

        if self.gone is not None:
            return False
        try:
            async with asyncio.timeout(ALIVE_SECONDS):
                await self.actor.where.remote()
        except RayError as error:
            self.gone = self.gone or why(error)
            return False
        except TimeoutError:
            return False
        return True

    async def _unless_ended(self, answer: Any) -> Any:
        """What Ray returns, unless `end` is called first: a process that is stopped may take its time to die."""
        asked = asyncio.ensure_future(_of(answer))
        ended = asyncio.ensure_future(self.ending.wait())
        try:
            await asyncio.wait({asked, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                raise Gone(self.gone or "was ended")
            return asked.result()
        finally:
            for task in (asked, ended):
                task.cancel()


ALIVE_SECONDS = 10.0
"""How long an actor may take to say that it lives."""


async def _of(reference: Any) -> Any:
    return await reference


def why(error: Exception) -> str:
    """Why a worker does not answer any more, from Ray's error."""
    from ray.exceptions import ActorUnavailableError

    text = str(error)
    if isinstance(error, ActorUnavailableError):
        return "cannot be reached"
    if "node" in text and ("died" in text or "dead" in text) and "node was terminated" in text.lower():
        return "its node is gone"
    return "its process died"
