"""Where environments are: in this process, in a worker of the backend, behind a URL; processes and containers that are
started for them are in servers.py."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from mrl.backends import Backend, Resources, WorkerHandle
from mrl.backends.code import put_code
from mrl.errors import ConfigError, EnvError, WorkerDied
from mrl.rewards.functions import split_file
from mrl.rollouts.openenv.results import Lost, Result, plain
from mrl.rollouts.openenv.serve import parameter
from mrl.rollouts.openenv.sessions import CLOSING_SECONDS, ClientSession, ObjectSession, Session

WORKER_SECONDS = 5.0
"""So much later than a worker itself it is noticed that it does not answer in time."""


@dataclass
class Schema:
    """What an environment says of its actions and observations, as JSON schemas; None = it does not say."""

    action: dict[str, Any] | None = None
    observation: dict[str, Any] | None = None


@dataclass
class Timing:
    """Seconds that things may take."""

    answer: float
    """An answer to reset and step."""
    connect: float
    """Until a server that does not answer counts as gone."""
    start: float
    """Until one that is started here answers."""


class Place:
    """Makes sessions. capacity: how many at a time; None = as many as it admits. `restarts` counts how often what it
    had started had died and was started anew."""

    name: str
    capacity: int | None = None

    def __init__(self) -> None:
        self.restarts = 0

    async def open(self) -> Session:
        """One more session, on something that is running. Raises Lost, EnvError."""
        raise NotImplementedError

    async def schema(self) -> Schema:
        """Asked once a session has been opened."""
        return Schema()

    async def close(self) -> None:
        """End what was started."""


class Here(Place):
    """Objects in this process. make: one that has `reset` and `step`; typed: leave its observations as they are."""

    def __init__(
        self, make: Callable[[], Any], env: Any, name: str, seconds: float, capacity: int | None, *, typed: bool
    ) -> None:
        super().__init__()
        self.make, self.env, self.name, self.seconds = make, env, name, seconds
        self.capacity, self.typed = capacity, typed

    async def open(self) -> Session:
        session = await ObjectSession.make(self.make, self.seconds, typed=self.typed)
        if _is_client(session.instance):
            session.thread.end()
            return ClientSession(session.instance, self.name, self.seconds, typed=self.typed)
        return session

    async def schema(self) -> Schema:
        return schema_of(self.env)


class InWorker(Place):
    """A worker of the run's backend. env: its class, or the class's name. kind: the class, where it is known here."""

    numbers = itertools.count()

    def __init__(
        self, backend: Backend, env: Any, arguments: dict[str, Any], kind: Any, resources: Resources, seconds: float
    ) -> None:
        super().__init__()
        self.backend, self.env, self.arguments, self.kind = backend, env, arguments, kind
        self.resources, self.seconds = resources, seconds
        self.name = f"environment-{next(self.numbers)}"
        self.worker: WorkerHandle | None = None
        self.sessions = itertools.count()
        self.starting = asyncio.Lock()

    async def open(self) -> Session:
        from mrl.rollouts.openenv.worker import EnvWorker

        async with self.starting:
            if self.worker is not None and not await self.worker.alive():
                await self.worker.kill()
                self.worker, self.restarts = None, self.restarts + 1
            if self.worker is None:
                args = {"env": await self._there(), "arguments": self.arguments, "seconds": self.seconds}
                try:
                    self.worker = await self.backend.spawn(
                        EnvWorker, name=self.name, resources=self.resources, args=args
                    )
                except WorkerDied as error:
                    raise EnvError(str(error)) from error
        session = WorkerSession(self.worker, next(self.sessions), self.seconds)
        await session.call("open")
        return session

    async def _there(self) -> Any:
        """The class as the worker finds it: `file.py:Class` names a file that it can read."""
        named = split_file(self.env) if isinstance(self.env, str) else None
        if named is None or not named[0].is_file():
            return self.env
        return f"{await put_code(self.backend, named[0])}:{named[1]}"

    async def schema(self) -> Schema:
        return schema_of(self.kind)

    async def close(self) -> None:
        worker, self.worker = self.worker, None
        if worker is not None:
            await worker.kill()


class WorkerSession:
    """A session of an EnvWorker. A worker that is gone, or stuck, ends its own sessions, not the run.

    seconds: that an answer may take, by the worker's own clock.
    """

    def __init__(self, worker: WorkerHandle, number: int, seconds: float) -> None:
        self.worker, self.number, self.seconds = worker, number, seconds

    async def call(self, method: str, *args: Any, seconds: float | None = None) -> Any:
        """Raises Lost, and what the method raises. seconds: None = as long as the backend lets calls take."""
        timeout = None if seconds is None else seconds + WORKER_SECONDS
        try:
            return await self.worker.call(method, self.number, *args, timeout=timeout)
        except WorkerDied as error:
            raise Lost(str(error)) from error

    async def reset(self, arguments: dict[str, Any]) -> Result:
        result: Result = await self.call("reset", arguments, seconds=self.seconds)
        return result

    async def step(self, action: Any) -> Result:
        result: Result = await self.call("step", plain(action), seconds=self.seconds)
        return result

    async def close(self) -> None:
        with contextlib.suppress(Lost):  # with all its sessions
            await self.call("end", seconds=CLOSING_SECONDS)


@dataclass
class Dialling:
    """How a server is asked.

    client: a class of OpenEnv's clients. typed: it has classes for actions and observations. headers: of every
    connection.
    """

    client: Any
    typed: bool
    timing: Timing
    headers: dict[str, str] = field(default_factory=dict)

    def session(self, url: str, name: str) -> ClientSession:
        """Not connected yet."""
        import inspect

        wanted = {
            "base_url": url,
            "connect_timeout_s": self.timing.connect,
            "message_timeout_s": self.timing.answer,
            "headers": self.headers or None,
        }
        takes = inspect.signature(self.client).parameters
        everything = any(one.kind is one.VAR_KEYWORD for one in takes.values())
        made = self.client(**{key: value for key, value in wanted.items() if everything or key in takes})
        return ClientSession(made, name, self.timing.answer, typed=self.typed)

    async def get(self, url: str, path: str) -> httpx.Response:
        """A page of the server's HTTP side. Raises httpx.HTTPError."""
        base = url.replace("ws://", "http://", 1).replace("wss://", "https://", 1).rstrip("/")
        async with httpx.AsyncClient(trust_env=not is_local(base), timeout=self.timing.connect) as client:
            return await client.get(base + path, headers=self.headers)


class Remote(Place):
    """A server that runs already."""

    def __init__(self, url: str, dialling: Dialling, name: str | None = None) -> None:
        super().__init__()
        self.url, self.dialling, self.name = url, dialling, name or url

    async def open(self) -> Session:
        session = self.dialling.session(self.url, self.name)
        try:
            await session.client.connect()
        except Exception as error:  # a client's own, too
            await session.close()
            raise self._unreachable(error) from error
        return session

    async def schema(self) -> Schema:
        try:
            answer = await self.dialling.get(self.url, "/schema")
            told = answer.json() if answer.is_success else {}
        except (httpx.HTTPError, ValueError):
            return Schema()
        return Schema(told.get("action"), told.get("observation")) if isinstance(told, dict) else Schema()

    def _unreachable(self, error: Exception) -> EnvError:
        text = str(error)
        if "HTTP 404" in text or "HTTP 403" in text or "HTTP 405" in text:
            return EnvError(
                f"{self.name}: it has no sessions at /ws ({text}): it is no OpenEnv server, or one of a version before "
                "sessions went over WebSockets"
            )
        return Lost(f"{self.name}: {text}")


def schema_of(env: Any) -> Schema:
    """From an environment's class."""
    if env is None:
        return Schema()
    action, observation = (parameter(env, place) for place in (0, 1))
    return Schema(
        *(kind.model_json_schema() if hasattr(kind, "model_json_schema") else None for kind in (action, observation))
    )


def is_local(url: str) -> bool:
    """Whether it is this machine's."""
    return (httpx.URL(url).host or "") in ("localhost", "127.0.0.1", "::1", "0.0.0.0")


def client_class() -> Any:
    """OpenEnv's client for dicts, strict about what an answer holds. Raises ConfigError where there is no openenv."""
    try:
        from openenv.core.client_types import StepResult
        from openenv.core.generic_client import GenericEnvClient
    except ImportError as error:
        raise ConfigError(
            f"rollout_source: openenv needs the package openenv here ({error}): pip install 'mrl[openenv]'. It cannot "
            "be in one environment with vLLM; name vLLM's with vllm_python (docs/openenv.md)"
        ) from error

    class AnyEnv(GenericEnvClient):
        def _parse_result(self, payload: dict[str, Any]) -> StepResult[dict[str, Any]]:
            return StepResult(payload["observation"], payload["reward"], payload["done"], payload.get("metadata"))

    return AnyEnv


def _is_client(instance: Any) -> bool:
    """Whether it is one of OpenEnv's that does not block; `.sync()` makes one that does, and has the same methods."""
    if not inspect.iscoroutinefunction(getattr(instance, "reset", None)):
        return False
    return hasattr(instance, "_parse_result") and hasattr(instance, "_step_payload") and hasattr(instance, "connect")
