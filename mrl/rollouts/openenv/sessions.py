"""Sessions: one environment each, reset for every attempt and asked step by step, over a connection or as an object."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import re
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, Protocol

from mrl.errors import EnvError
from mrl.rollouts.openenv.results import AtCapacity, Lost, Result, result_of
from mrl.rollouts.openenv.serve import parameter
from mrl.rollouts.tools.environments import OwnThread
from mrl.rollouts.tools.functions import described

_CODE = re.compile(r"^(?:Server error: )?(?P<message>.*) \(code: (?P<code>\w+)\)$", re.DOTALL)
"""How OpenEnv's clients word an error of the server."""
CLOSING_SECONDS = 10.0
"""How long an environment may take over being closed."""


class Session(Protocol):
    """One environment, used by one attempt at a time."""

    async def reset(self, arguments: dict[str, Any]) -> Result:
        """Begin an attempt. Raises AtCapacity, Lost, EnvError."""
        ...

    async def step(self, action: Any) -> Result:
        """Carry out an action, once: it is never repeated. Raises Lost, EnvError."""
        ...

    async def close(self) -> None:
        """Give the environment back. Never raises."""
        ...


class ClientSession:
    """An OpenEnv client's connection, which has one environment of the server.

    client: not connected yet. name: of the server, for messages. seconds: that an answer may take. typed: the client
    has classes for actions and observations.
    """

    def __init__(self, client: Any, name: str, seconds: float, *, typed: bool) -> None:
        self.client, self.name, self.seconds, self.typed = client, name, seconds, typed
        self.reads = described(type(client)._parse_result)
        self.connection: Any = None
        """That it was reset over."""

    async def reset(self, arguments: dict[str, Any]) -> Result:
        result = await self._ask("reset", lambda: self.client.reset(**arguments))
        self.connection = getattr(self.client, "_ws", None)
        return result

    async def step(self, action: Any) -> Result:
        try:
            self.client._step_payload(action)
        except Exception as error:
            raise EnvError(
                f"{described(type(self.client)._step_payload)} does not take the action {action!r} "
                f"({type(error).__name__}: {error}); action_parser has to give what this client sends"
            ) from error
        if not self._is_connected():
            raise Lost(f"{self.name}: the connection was lost before step")
        return await self._ask("step", lambda: self.client.step(action))

    async def close(self) -> None:
        with contextlib.suppress(Exception):  # the connection is given up, whatever its other end says to that
            async with asyncio.timeout(CLOSING_SECONDS):
                await self.client.close()

    def _is_connected(self) -> bool:
        """Whether the connection of the last reset is still there. Without it the client would make another one, and
        the action would be carried out in an environment that nobody has reset."""
        from websockets.protocol import State

        state = getattr(self.connection, "state", None)
        return state is None or (state is State.OPEN and self.client._ws is self.connection)

    async def _ask(self, what: str, ask: Callable[[], Awaitable[Any]]) -> Result:
        from websockets.exceptions import WebSocketException

        try:
            async with asyncio.timeout(self.seconds):
                answer = await ask()
        except TimeoutError:
            raise EnvError(f"{self.name}: no answer to {what} within {self.seconds:g} s (request_timeout_s)") from None
        except (OSError, WebSocketException) as error:
            raise Lost(
                f"{self.name}: the connection was lost during {what}: {error or type(error).__name__}"
            ) from error
        except RuntimeError as error:
            raise self._said(what, str(error)) from error
        except Exception as error:
            raise EnvError(
                f"{self.name}: {self.reads} cannot read the server's answer to {what} ({type(error).__name__}: "
                f"{error}); the server may be of another version than this client"
            ) from error
        return result_of(answer, f"{self.name}: {what}, as {self.reads} read it,", typed=self.typed)

    def _said(self, what: str, text: str) -> EnvError:
        """The server's error, in words that say what to do about it."""
        match = _CODE.match(text)
        if match is None:
            return EnvError(f"{self.name}: {what}: {text}")
        message, code = match["message"], match["code"]
        if code == "CAPACITY_REACHED":
            return AtCapacity(f"{self.name}: {message}")
        if code == "VALIDATION_ERROR" and what == "step":
            return EnvError(
                f"{self.name}: the server's action class refuses the action: its fields are not those it has. "
                f"action_parser has to give them (the server's /schema lists them); it said: {message}"
            )
        if code in ("UNKNOWN_TYPE", "INVALID_JSON", "VALIDATION_ERROR"):
            return EnvError(
                f"{self.name}: the server does not know the message {what!r} ({message}); it speaks another version of "
                "OpenEnv's protocol than the client that is installed here"
            )
        return EnvError(f"{self.name}: {what} failed on the server: {message} ({code})")


class ObjectSession:
    """An environment's instance, or a client's that blocks, which lives on a thread of its own.

    Methods that are asynchronous (`step_async`, as OpenEnv's server prefers it) run on the event loop. typed: leave
    observations as they are.
    """

    def __init__(self, thread: OwnThread, seconds: float, *, typed: bool) -> None:
        self.thread, self.seconds, self.typed = thread, seconds, typed
        self.instance: Any = None

    @classmethod
    async def make(cls, factory: Callable[[], Any], seconds: float, *, typed: bool) -> ObjectSession:
        """Raises EnvError for a constructor that does."""
        session = cls(OwnThread("mrl-environment"), seconds, typed=typed)

        def make() -> None:
            session.instance = factory()

        try:
            await session.thread.call(make)
            if inspect.isawaitable(session.instance):
                session.instance = await session.instance
        except Exception as error:
            session.thread.end()
            who = described(getattr(factory, "func", factory))  # of a partial, the class
            raise EnvError(f"{who} could not be made: {type(error).__name__}: {error}") from error
        except BaseException:  # cancelled, and it may be made all the same
            session._end()
            raise
        return session

    async def reset(self, arguments: dict[str, Any]) -> Result:
        reset = self._method("reset")
        return await self._ask(reset, **accepted(self.instance.reset, arguments))

    async def step(self, action: Any) -> Result:
        return await self._ask(self._method("step"), self._action(action))

    async def close(self) -> None:
        closing = asyncio.wrap_future(self._end())
        with contextlib.suppress(Exception):  # nobody uses it any more
            async with asyncio.timeout(CLOSING_SECONDS):
                closed = await asyncio.shield(closing)
                if inspect.isawaitable(closed):
                    await closed

    def _end(self) -> Future[Any]:
        """Have the environment closed when the thread gets to it, however long a step still takes."""

        def close() -> Any:
            with contextlib.suppress(Exception):
                return None if (method := getattr(self.instance, "close", None)) is None else method()

        closing = self.thread.begin(close)
        self.thread.end()
        return closing

    def _method(self, name: str) -> Callable[..., Any]:
        """The asynchronous form where the class has one of its own."""
        own = next((c for c in type(self.instance).__mro__ if f"{name}_async" in vars(c)), None)
        has_own = own is not None and not own.__module__.startswith("openenv.core.env_server.interfaces")
        return getattr(self.instance, f"{name}_async" if has_own else name)

    def _action(self, action: Any) -> Any:
        """A dict as the environment's own class of actions."""
        kind = parameter(type(self.instance), 0)
        if not isinstance(action, dict) or not hasattr(kind, "model_validate"):
            return action
        kind = _tool_action(action) or kind
        try:
            return kind.model_validate(action)
        except ValueError as error:
            raise EnvError(
                f"{described(kind)} does not take the action {action!r}: {error}; action_parser has to give its fields"
            ) from error

    async def _ask(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Result:
        who = described(method)
        try:
            async with asyncio.timeout(self.seconds):
                if inspect.iscoroutinefunction(method):
                    answer = await method(*args, **kwargs)
                else:
                    answer = await self.thread.call(method, *args, **kwargs)
                    answer = await answer if inspect.isawaitable(answer) else answer
        except TimeoutError:
            raise EnvError(f"{who} took longer than {self.seconds:g} s (request_timeout_s)") from None
        except (Exception, SystemExit) as error:  # of an asynchronous method, too
            raise EnvError(f"{who} raised {type(error).__name__}: {error}") from error
        return result_of(answer, who, typed=self.typed)


def accepted(function: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Those that it takes: all, with `**kwargs` among its parameters. OpenEnv's server does the same."""
    parameters = inspect.signature(function).parameters
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}


def _tool_action(action: dict[str, Any]) -> Any:
    """OpenEnv's class for listing and calling tools, where the action is that."""
    if action.get("type") not in ("list_tools", "call_tool"):
        return None
    from openenv.core.env_server.mcp_types import CallToolAction, ListToolsAction

    return ListToolsAction if action["type"] == "list_tools" else CallToolAction
