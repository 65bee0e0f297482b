"""Serving the logs page: an address, a token where others can reach it, and an end."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from mrl.errors import ConfigError
from mrl.logs.catalog import Catalog
from mrl.logs.security import new_token
from mrl.server.serving import is_loopback

TOKEN = "MRL_LOGS_TOKEN"
"""Environment variable with a token of one's own, which is then asked for on this machine, too."""


@dataclass(frozen=True)
class Address:
    """Where it is served, taken when this is made."""

    socket: socket.socket
    url: str
    token: str | None

    @property
    def link(self) -> str:
        """What to open first."""
        return self.url if self.token is None else f"{self.url}?token={self.token}"


def take_address(host: str, port: int, *, any_port: bool = False) -> Address:
    """Bind. any_port: take another one where this is taken. Raises ConfigError."""
    if not 0 <= port < 65536:
        raise ConfigError(f"--port: {port} is no port; use 0 (any that is free) to 65535")
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"--host: {host!r} is no address of this machine ({error}); use 127.0.0.1") from None
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        try:
            made.bind(where)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or not any_port:
                raise
            made.bind((where[0], 0, *where[2:]))
        made.listen(128)
    except OSError as error:
        made.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"--port: {port} is taken by another program; end that, or give another one, e.g. --port {port + 1} "
                "(0 = any that is free)"
            ) from None
        raise ConfigError(f"--host: {host}:{port} cannot be served ({error.strerror})") from None
    token = os.environ.get(TOKEN) or (None if is_loopback(str(where[0])) else new_token())
    return Address(made, f"http://{_shown(host)}:{made.getsockname()[1]}/", token)


def serve(address: Address, catalog: Catalog, *, until_stdin_ends: bool = False) -> None:
    """Answer until it is interrupted. until_stdin_ends: also until nobody holds the other end of standard input."""
    import uvicorn

    from mrl.logs.app import create_app

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            if until_stdin_ends:  # signals are the run's
                yield
            else:
                with super().capture_signals():
                    yield

    # Intervals need it, and it takes a second: not of whoever opens the evaluations first.
    threading.Thread(target=importlib.import_module, args=("scipy.stats",), daemon=True).start()
    app = create_app(catalog, token=address.token)
    server = Server(
        uvicorn.Config(app, log_level="error", access_log=False, lifespan="off", timeout_graceful_shutdown=1)
    )
    if until_stdin_ends:

        def wait() -> None:
            sys.stdin.read()
            server.should_exit = True

        threading.Thread(target=wait, daemon=True).start()
    server.run(sockets=[address.socket])


def _shown(host: str) -> str:
    """A host that can be opened in a browser."""
    if host in ("0.0.0.0", "::"):
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host
