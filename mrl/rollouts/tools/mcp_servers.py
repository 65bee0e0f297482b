"""MCP servers as sets of tools: what a server lists, the policy may call.

A server keeps state by session (a browser's page, a transaction), so an attempt has a session of its own, opened with
its first call, unless the server is `shared`. A session lives in a task of its own: the library wants it opened and
closed by the same one.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import shlex
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields, replace
from importlib.util import find_spec
from typing import Any, TypeVar
from urllib.parse import urlsplit

from mrl.errors import ConfigError, EnvError
from mrl.rollouts.chat import ToolSpec
from mrl.rollouts.tools.functions import Tool

T = TypeVar("T")

PREFIX = "mcp:"
OPEN_SECONDS = 60.0
"""What a server may take to start, or to answer the first message."""
CLOSE_SECONDS = 10.0
LOOK_SECONDS = 2.0
"""How often it is looked whether a server that has not answered is still there: the library may wait for ever."""
_FROM_NO_SERVER = (-32000, -32001, -32700)
"""Codes of errors that the library makes itself where a connection has ended, or brings what is no answer."""
_SESSION_GONE = "Session terminated"


@dataclass(frozen=True)
class MCPServer:
    """A server whose tools the policy may call.

        tools=[MCPServer("http://127.0.0.1:8000/mcp"), MCPServer("python files_server.py", only=["read_file"])]

    where: an address (streamable HTTP), or a command that is run and talked to by its input and output. By name, in a
    recipe or on the command line: `mcp:http://127.0.0.1:8000/mcp`, `mcp:python files_server.py`.
    """

    where: str
    """An address or a command."""
    shared: bool = False
    """One session for all attempts, instead of one for each."""
    only: tuple[str, ...] | list[str] = ()
    """Names of the tools to take; none = all."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of a command, besides this process's own."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Of HTTP requests. `$NAME` in them is replaced by that environment variable, so that no secret is recorded."""

    @classmethod
    def named(cls, given: str | dict[str, Any]) -> MCPServer:
        """As an option names it: `mcp:` and where it is, or `{"mcp": where, "shared": true}`. Raises ConfigError."""
        options = {"mcp": given.removeprefix(PREFIX).strip()} if isinstance(given, str) else dict(given)
        known = [one.name for one in fields(cls)][1:]
        if unknown := [name for name in options if name not in ("mcp", *known)]:
            raise ConfigError(f"tools: {given!r}: a server has no {unknown[0]!r}, but mcp, {', '.join(known)}")
        where = options.pop("mcp", None)
        if not where or not isinstance(where, str):
            raise ConfigError(f"tools: {given!r} names no server; write mcp: and an address or a command")
        return cls(where, **options)

    def recorded(self) -> str | dict[str, Any]:
        """What `named` takes."""
        changed = {one.name: getattr(self, one.name) for one in fields(self)[1:] if getattr(self, one.name)}
        return {"mcp": self.where, **changed} if changed else PREFIX + self.where

    @property
    def is_remote(self) -> bool:
        """Whether it is reached by an address."""
        return self.where.startswith(("http://", "https://"))

    def __str__(self) -> str:
        return f"MCP server {self.where!r}"

    def tools(self) -> list[Tool]:
        """What it lists, asked for on a thread of its own. Raises ConfigError."""
        if find_spec("mcp") is None:
            raise ConfigError(f"tools: {self} needs the package mcp; pip install 'mrl[mcp]'")
        if not self.is_remote and self.headers:
            raise ConfigError(f"tools: {self} is a command, which has no use for headers; give env")
        if self.is_remote and self.env:
            raise ConfigError(f"tools: {self} is an address, which has no use for env; give headers")
        try:
            listed = _elsewhere(self._listed())
        except EnvError as error:
            raise ConfigError(f"tools: {error}") from error
        there = [tool["name"] for tool in listed]
        if missing := [name for name in self.only if name not in there]:
            raise ConfigError(f"tools: {self} has no tool {missing[0]!r}; it has {', '.join(there) or 'none'}")
        if not listed:
            raise ConfigError(f"tools: {self} has no tools")
        specs = [_spec(tool) for tool in listed if not self.only or tool["name"] in self.only]
        return [Tool(spec["function"]["name"], spec, ServerCall(self, spec["function"]["name"])) for spec in specs]

    async def _listed(self) -> list[dict[str, Any]]:
        session = Session(self)
        try:
            await session.connected()
            async with asyncio.timeout(OPEN_SECONDS):
                return await session.tools()
        except TimeoutError:
            raise EnvError(f"{self} did not list its tools within {OPEN_SECONDS:g} s") from None
        finally:
            await session.close()


@dataclass(frozen=True, repr=False)
class ServerCall:
    """A tool's function, until an attempt binds it to a session."""

    server: MCPServer
    name: str

    def __repr__(self) -> str:
        return f"{self.name} of {self.server}"

    def __call__(self, **arguments: Any) -> Any:
        raise AssertionError("it has no session")

    def bound_to(self, session: Session) -> Callable[..., Any]:
        """What calls it."""

        async def call(**arguments: Any) -> Any:
            return await session.call(self.name, arguments)

        call.__wrapped__ = self  # type: ignore[attr-defined]  # by which messages name it
        return call


class Sessions:
    """The sessions of an attempt. shared: those that outlive it, by `id` of the server."""

    def __init__(self, shared: dict[int, Session]) -> None:
        self.shared, self.own = shared, dict[int, Session]()

    def bound(self, tools: Mapping[str, Tool]) -> dict[str, Tool]:
        """Tools of servers, bound to their sessions; the others as they are."""
        return {name: self._bound(tool) for name, tool in tools.items()}

    async def close(self) -> None:
        """End those of the attempt."""
        await asyncio.gather(*(session.close() for session in self.own.values()))

    def _bound(self, tool: Tool) -> Tool:
        call = tool.function
        if not isinstance(call, ServerCall):
            return tool
        sessions = self.shared if call.server.shared else self.own
        session = sessions.setdefault(id(call.server), Session(call.server))
        return replace(tool, function=call.bound_to(session))


class Session:
    """A connection to a server, opened with the first call, and anew where it has broken and is `shared`."""

    def __init__(self, server: MCPServer) -> None:
        self.server = server
        self._opened: asyncio.Task[_Connection] | None = None

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """What a tool answers: text, or a list of parts where images are among them.

        Raises ToolError for what the server says is wrong with the call; EnvError when it cannot be reached any more,
        which is no fault of the policy's.
        """
        from mcp.types import CallToolResult

        result: CallToolResult = await self._ask(lambda client: client.call_tool(name, arguments))
        said = result.model_dump(by_alias=True, mode="json")
        content = [_part(self.server, name, part) for part in said["content"]]
        if not content and said.get("structuredContent") is not None:
            content = [{"type": "text", "text": json.dumps(said["structuredContent"])}]
        if said.get("isError"):
            raise ToolError("\n".join(part.get("text", "") for part in content))
        if any(part["type"] != "text" for part in content):
            return content
        return "\n".join(part["text"] for part in content)

    async def tools(self) -> list[dict[str, Any]]:
        """What the server lists, all pages of it."""
        listed: list[dict[str, Any]] = []
        asked: dict[str, Any] = {}
        while True:
            page = await self._ask(_lists(asked))
            listed += [tool.model_dump(by_alias=True, mode="json") for tool in page.tools]
            cursor = page.model_dump(by_alias=True).get("nextCursor")
            if cursor is None:
                return listed
            asked = _from(cursor)

    async def close(self) -> None:
        """End the connection, if there is one."""
        opened, self._opened = self._opened, None
        if opened is None:
            return
        if opened.done() and not opened.cancelled() and opened.exception() is None:
            await opened.result().close()
        else:
            opened.cancel()
            await asyncio.gather(opened, return_exceptions=True)

    async def _ask(self, ask: Callable[[Any], Coroutine[Any, Any, T]]) -> T:
        """What the server answers. Raises ToolError where that is an error, EnvError where it is gone."""
        connection = await self.connected()
        work = asyncio.ensure_future(ask(connection.client))
        try:
            while not work.done():
                await asyncio.wait([work, connection.task], timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if not work.done() and (gone := await connection.gone()):
                    raise EnvError(f"{self.server} is gone: {gone}")
            return work.result()
        except Exception as error:
            said = getattr(error, "error", None)  # of an MCPError, as it is called since 2
            if said is not None and said.code not in _FROM_NO_SERVER and said.message != _SESSION_GONE:
                raise ToolError(str(error)) from error
            await self._drop(connection)  # the next call, or the next attempt, tries again
            raise (
                error if isinstance(error, EnvError) else EnvError(f"{self.server} is gone: {_root(error)}")
            ) from error
        finally:
            if not work.done():
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)

    async def _drop(self, connection: _Connection) -> None:
        opened = self._opened
        if opened is not None and opened.done() and opened.result() is connection:
            self._opened = None
        await connection.close()

    async def connected(self) -> _Connection:
        """The connection, opened where there is none. Raises EnvError when it cannot be."""
        if self._opened is None:
            self._opened = asyncio.ensure_future(_Connection.open(self.server))
        opened = self._opened
        try:
            return await asyncio.shield(opened)
        except EnvError:
            if self._opened is opened:
                self._opened = None
            raise


class ToolError(Exception):
    """What a server says of a call that failed."""


class _Connection:
    """An initialized client, and the task that it lives in."""

    def __init__(self, server: MCPServer, client: Any, task: asyncio.Task[None], end: asyncio.Event) -> None:
        self.server, self.client, self.task, self.end = server, client, task, end

    @classmethod
    async def open(cls, server: MCPServer) -> _Connection:
        """Raises EnvError."""
        end = asyncio.Event()
        ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        async def live() -> None:
            async with _client(server) as client:
                if not ready.done():
                    ready.set_result(client)
                await end.wait()

        task = asyncio.ensure_future(live())
        try:
            async with asyncio.timeout(OPEN_SECONDS):
                await asyncio.wait([ready, task], return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise EnvError(f"{server} did not answer within {OPEN_SECONDS:g} s") from None
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise
        if not ready.done():
            error = task.exception()
            raise EnvError(f"{server} cannot be reached: {_root(error)}") from error
        return cls(server, ready.result(), task, end)

    async def close(self) -> None:
        self.end.set()
        await asyncio.wait([self.task], timeout=CLOSE_SECONDS)
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)  # what ends badly has ended all the same

    async def gone(self) -> str | None:
        """What ended it; None while it lasts."""
        if self.task.done():
            error = None if self.task.cancelled() else self.task.exception()
            return "its connection ended" if error is None else _root(error)
        if not self.server.is_remote:
            return None
        url = urlsplit(self.server.where)
        port = url.port or (443 if url.scheme == "https" else 80)
        try:
            # Not a message: a server that is at work on a call may answer none, and still takes connections.
            async with asyncio.timeout(OPEN_SECONDS):
                _, writer = await asyncio.open_connection(url.hostname, port)
        except OSError as error:  # a timeout is one too
            return _root(error)
        writer.close()
        return None


@asynccontextmanager
async def _client(server: MCPServer) -> AsyncIterator[Any]:
    """An initialized `ClientSession`: the same in versions 1 and 2 of the library."""
    from mcp import ClientSession

    if server.is_remote:
        from mcp.client.streamable_http import streamable_http_client
        from mcp.shared._httpx_utils import create_mcp_http_client

        async with (
            create_mcp_http_client(headers=_expanded(server.headers)) as http,
            streamable_http_client(server.where, http_client=http) as streams,
            ClientSession(streams[0], streams[1]) as client,
        ):
            await client.initialize()
            yield client
        return
    from mcp import StdioServerParameters
    from mcp.client.stdio import stdio_client

    command, *arguments = shlex.split(server.where)
    parameters = StdioServerParameters(command=command, args=arguments, env={**os.environ, **_expanded(server.env)})
    async with stdio_client(parameters) as (read, write), ClientSession(read, write) as client:
        await client.initialize()
        yield client


def _expanded(values: Mapping[str, str]) -> dict[str, str]:
    return {name: os.path.expandvars(value) for name, value in values.items()}


def _lists(asked: dict[str, Any]) -> Callable[[Any], Coroutine[Any, Any, Any]]:
    return lambda client: client.list_tools(**asked)


def _from(cursor: str) -> dict[str, Any]:
    from mcp.types import PaginatedRequestParams

    return {"params": PaginatedRequestParams(cursor=cursor)}


def _spec(tool: dict[str, Any]) -> ToolSpec:
    parameters = tool.get("inputSchema") or {"type": "object", "properties": {}}
    described = {"name": tool["name"], "description": tool.get("description") or "", "parameters": parameters}
    return {"type": "function", "function": described}


def _part(server: MCPServer, name: str, part: dict[str, Any]) -> dict[str, Any]:
    """A part of a result in the form of chat messages. Raises EnvError for what is neither text nor an image."""
    if part["type"] == "text":
        return {"type": "text", "text": part["text"]}
    if part["type"] == "resource" and "text" in part["resource"]:
        return {"type": "text", "text": part["resource"]["text"]}
    if part["type"] == "resource_link":
        return {"type": "text", "text": str(part["uri"])}
    if part["type"] == "image":
        from PIL import Image

        return {"type": "image", "image": Image.open(io.BytesIO(base64.b64decode(part["data"])))}
    raise EnvError(f"{server}: {name} returned a part of type {part['type']!r}, and only text and images are taken")


def _root(error: BaseException | None) -> str:
    """The first error that is no group of others: the library raises them in groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if error is None:
        return "its connection ended"
    return f"{type(error).__name__}: {error}".rstrip(": ")


def _elsewhere(work: Coroutine[Any, Any, T]) -> T:
    """Run it on an event loop of its own, wherever this is called."""
    results: list[T] = []
    errors: list[BaseException] = []

    def target() -> None:
        try:
            results.append(asyncio.run(work))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=target, name="mrl-mcp", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
