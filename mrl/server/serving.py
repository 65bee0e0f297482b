"""An address taken at once, and an app served there on the event loop that runs."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import os
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mrl.errors import ConfigError

if TYPE_CHECKING:
    from fastapi import FastAPI

SECONDS_TO_END = 1
"""Requests under way when serving ends get so long."""


class Serving:
    """Takes an address when it is made, so that one that is taken is known before anything expensive starts.

    address: `host:port`; port 0 = any that is free. token_variable: the environment variable with the token that
    requests have to bring; without one, only this machine may ask. Raises ConfigError.
    """

    def __init__(self, address: str, token_variable: str) -> None:
        host, port = split_address(address)
        self.token = os.environ.get(token_variable) or None
        if self.token is None and not is_loopback(host):
            raise ConfigError(
                f"serve: {address} can be reached from other machines, and whoever does can use the policy; put a "
                f"token into the environment variable {token_variable}, or use serve: 127.0.0.1:{port}"
            )
        self.socket = _bound(host, port, address)
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self.socket.getsockname()[1]}"
        self._server: Any = None
        self._task: asyncio.Task[None] | None = None

    async def start(self, app: FastAPI) -> None:
        """Returns when it answers."""
        import uvicorn

        class Server(uvicorn.Server):
            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:
                yield  # signals are the run's

        config = uvicorn.Config(
            app,
            log_level="error",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=SECONDS_TO_END,
        )
        self._server = Server(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[self.socket]))
        while not self._server.started:
            if self._task.done():
                self._task.result()
                raise ConfigError(f"serve: the server at {self.url} did not start")
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        """Answer nothing any more and free the address."""
        if self._task is not None:
            self._server.should_exit = True
            await self._task
            self._task = None
        self.socket.close()


def split_address(address: str) -> tuple[str, int]:
    """`127.0.0.1:8000`, `[::1]:8000`. Raises ConfigError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"serve: {address!r} is not of the form host:port, e.g. 127.0.0.1:8000")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _bound(host: str, port: int, address: str) -> socket.socket:
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"serve: {address} is no address of this machine: {error}") from None
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(where)
        made.listen(2048)  # also keeps others from taking it
    except OSError as error:
        made.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"serve: {address} is taken by another program; end that, or take any free port with serve: "
                f"{host}:0, which a rollout function finds as args.vllm_server_base_url"
            ) from None
        raise ConfigError(f"serve: {address} cannot be served: {error.strerror}") from None
    return made
