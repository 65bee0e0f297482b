"""The environment worker: an OpenEnv environment class, with as many sessions as it may have, on any backend."""

from __future__ import annotations

import functools
from typing import Any

from mrl.errors import EnvError
from mrl.rollouts.openenv.results import Result
from mrl.rollouts.openenv.sessions import ObjectSession
from mrl.rollouts.tools.functions import found


class EnvWorker:
    """Environments of one class, each in a session of its own. Actions and observations travel as dicts.

    env: the class, or `file.py:Class`. arguments: of its constructor. seconds: that an answer may take.
    Raises ConfigError for a name that does not import.
    """

    def __init__(self, env: Any, arguments: dict[str, Any], seconds: float) -> None:
        self.make = functools.partial(found(env, "rollout_options: env_class"), **arguments)
        self.seconds = seconds
        self.sessions: dict[int, ObjectSession] = {}

    async def open(self, number: int) -> None:
        """Make the environment of a session. Raises EnvError."""
        self.sessions[number] = await ObjectSession.make(self.make, self.seconds, typed=False)

    async def reset(self, number: int, arguments: dict[str, Any]) -> Result:
        """Raises EnvError."""
        return await self._session(number).reset(arguments)

    async def step(self, number: int, action: Any) -> Result:
        """Raises EnvError."""
        return await self._session(number).step(action)

    async def end(self, number: int) -> None:
        """Close a session, if it is open."""
        session = self.sessions.pop(number, None)
        if session is not None:
            await session.close()

    async def close(self) -> None:
        """Close all."""
        for number in list(self.sessions):
            await self.end(number)

    def _session(self, number: int) -> ObjectSession:
        if number not in self.sessions:
            raise EnvError(f"session {number} is not open")
        return self.sessions[number]
