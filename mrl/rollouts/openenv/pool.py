"""Sessions that attempts take in turn: no more than there may be, and a server that is full is waited for.

    attempt ─▶ begin ─▶ idle session, or another one where there is room ─▶ reset ─▶ the first observation
                 ▲          the server is full: wait until one comes back, try another now and then
                 └──────── give_back: idle, or closed where it cannot be used again

Only reset is ever tried again, on another session: nothing has happened in the attempt by then.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mrl.errors import EnvError
from mrl.rollouts.openenv.places import Place
from mrl.rollouts.openenv.results import AtCapacity, Lost, Result
from mrl.rollouts.openenv.sessions import Session

FIRST_WAIT, LONGEST_WAIT = 0.25, 30.0
"""Seconds between two tries of a server that is full, doubled each time."""
LOST_WAIT = 0.25
"""Seconds between two tries of one that does not answer."""


@dataclass
class Seat:
    """A session while somebody has it."""

    session: Session
    room: _Room
    used: bool = False
    """Whether it was reset before."""


class _Room:
    """A place, and what is known of it."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.idle: list[Seat] = []
        self.open = 0
        self.not_before = 0.0
        """When another session may be tried, on the loop's clock."""
        self.wait = FIRST_WAIT
        self.down_since: float | None = None
        self.avoid_until = 0.0
        """Where it did not answer: others that have room are taken first."""

    def has_room(self, now: float) -> bool:
        return (self.place.capacity is None or self.open < self.place.capacity) and now >= self.not_before


class Pool:
    """Sessions of some places. most: sessions at a time. connect_seconds: how long none may answer before attempts
    fail. note: told once when attempts wait for a full server."""

    def __init__(self, places: Sequence[Place], most: int, connect_seconds: float, note: Callable[[str], None]) -> None:
        self.rooms = [_Room(place) for place in places]
        self.most, self.connect_seconds, self.note = most, connect_seconds, note
        self.waiting: deque[asyncio.Future[None]] = deque()
        self.closing: set[asyncio.Task[None]] = set()
        self.told = False

    async def begin(self, arguments: dict[str, Any], seconds: float | None = None) -> tuple[Seat, Result]:
        """A session that was reset with these arguments, when there is one. seconds: that the reset may take.

        Raises EnvError for a reset that fails, and Lost where no place answers for too long.
        """
        while True:
            seat = await self._take()
            try:
                async with asyncio.timeout(seconds) as limit:
                    result = await seat.session.reset(arguments)
            except AtCapacity as error:
                self._refused(seat, error)
            except Lost as error:
                self.give_back(seat, usable=False)
                if not seat.used:
                    await self._be_patient(seat.room, error)
            except TimeoutError:
                self.give_back(seat, usable=False)
                if not limit.expired():
                    raise
                raise EnvError(
                    f"{seat.room.place.name}: no first observation within {seconds:g} s (step_timeout)"
                ) from None
            except BaseException:
                self.give_back(seat, usable=False)
                raise
            else:
                self._accepted(seat)
                return seat, result

    def give_back(self, seat: Seat, *, usable: bool) -> None:
        """usable: nothing of the attempt is still going on, and nothing has gone wrong."""
        if usable:
            seat.room.idle.append(seat)
            self._wake()
        else:
            self._close_later(seat)

    async def close(self) -> None:
        """End all sessions and places."""
        idle = [seat for room in self.rooms for seat in room.idle]
        for room in self.rooms:
            room.idle.clear()
        await asyncio.gather(*(seat.session.close() for seat in idle), *self.closing)
        await asyncio.gather(*(room.place.close() for room in self.rooms))

    # --- inner ------------------------------------------------------------------------------------------------------

    async def _take(self) -> Seat:
        while True:
            for room in self.rooms:
                if room.idle:
                    return room.idle.pop()
            free = self._free()
            if free is None:
                await self._until_woken()
                continue
            free.open += 1
            try:
                return Seat(await free.place.open(), free)
            except Lost as error:
                self._closed(free)
                await self._be_patient(free, error)
            except BaseException:
                self._closed(free)
                raise

    def _free(self) -> _Room | None:
        now = asyncio.get_running_loop().time()
        if sum(room.open for room in self.rooms) >= self.most:
            return None
        rooms = [room for room in self.rooms if room.has_room(now)]
        return min(rooms, key=lambda room: (now < room.avoid_until, room.open), default=None)

    def _accepted(self, seat: Seat) -> None:
        seat.room.down_since, seat.room.avoid_until = None, 0.0
        if not seat.used and seat.room.not_before:  # where there was room for one more, there may be for others
            seat.room.wait, seat.room.not_before = FIRST_WAIT, 0.0
            self._wake()
        seat.used = True

    def _refused(self, seat: Seat, error: AtCapacity) -> None:
        loop, room = asyncio.get_running_loop(), seat.room
        now = loop.time()
        if now >= room.not_before:  # others may have been refused at the same time
            room.not_before, room.wait = now + room.wait, min(2 * room.wait, LONGEST_WAIT)
            loop.call_at(room.not_before + 1e-3, self._wake)
        if not self.told:
            self.told = True
            self.note(f"{error}; attempts wait until a session is free")
        self._close_later(seat)

    async def _be_patient(self, room: _Room, error: Lost) -> None:
        """Wait a moment before the next try. Raises the error when all places were gone for too long."""
        now = asyncio.get_running_loop().time()
        room.down_since = now if room.down_since is None else room.down_since
        room.avoid_until = now + LONGEST_WAIT
        if all(one.down_since is not None and now - one.down_since >= self.connect_seconds for one in self.rooms):
            raise error
        await asyncio.sleep(LOST_WAIT)

    async def _until_woken(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self._wake()  # whoever comes next
            raise
        finally:
            with contextlib.suppress(ValueError):
                self.waiting.remove(waiter)

    def _wake(self) -> None:
        while self.waiting:
            waiter = self.waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    def _close_later(self, seat: Seat) -> None:
        """It has its place until it is closed: the server would refuse another one before."""

        async def close() -> None:
            try:
                await seat.session.close()
            finally:
                self._closed(seat.room)

        task = asyncio.get_running_loop().create_task(close())
        self.closing.add(task)
        task.add_done_callback(self.closing.discard)

    def _closed(self, room: _Room) -> None:
        room.open -= 1
        self._wake()
