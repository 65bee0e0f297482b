"""One Chromium for all sessions of a process, and the server of the pages that it may see."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import os
import shutil
import threading
from collections.abc import Awaitable, Callable
from functools import cache, partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mrl.errors import EnvError

if TYPE_CHECKING:
    from playwright.async_api import Browser as Chromium
    from playwright.async_api import BrowserContext

T = TypeVar("T")

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
START_SECONDS = 60.0
"""Within which Chromium has to have started."""


class Browser:
    """Starts when the first session needs it, and again for the next one after it died. Usable from any thread."""

    def __init__(self, executable: str, pages: Path) -> None:
        """executable: Chromium's. pages: the folder whose files are all that it can see."""
        self.executable, self.pages = executable, pages
        self.starts = 0
        self._starting = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._playwright: Any = None
        self._chromium: Chromium | None = None
        self._one_starts: asyncio.Lock | None = None
        self.url = ""

    def run(self, work: Callable[[], Awaitable[T]], seconds: float) -> T:
        """What comes of it, on the browser's thread. Raises EnvError when it takes longer than `seconds`."""

        async def limited() -> T:
            async with asyncio.timeout(seconds):
                return await work()

        future = asyncio.run_coroutine_threadsafe(limited(), self._running_loop())
        try:
            return future.result(seconds + 5)
        except TimeoutError:
            future.cancel()
            raise EnvError(f"the browser did not answer for {seconds:g} s") from None

    async def session(self) -> BrowserContext:
        """A session of its own: nothing is shared with others but the process. Raises EnvError when it cannot start."""
        from playwright.async_api import Error

        for _ in range(2):
            chromium = await self._running()
            try:
                return await chromium.new_context(
                    viewport={"width": 500, "height": 320}, locale="en-US", timezone_id="UTC", accept_downloads=False
                )
            except Error as error:  # it may have died just now
                reason = error
        raise EnvError(f"{self.executable}: {reason}") from reason

    def give_back(self, session: BrowserContext) -> None:
        """End a session, some time soon: a garbage collection may ask for it."""
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(session.close(), self._loop)

    def close(self) -> None:
        """Leave no process behind."""
        with self._starting:
            loop, self._loop = self._loop, None
        if loop is not None:
            future = asyncio.run_coroutine_threadsafe(self._stop(), loop)
            concurrent.futures.wait([future], 10)
            loop.call_soon_threadsafe(loop.stop)

    # --- inner ------------------------------------------------------------------------------------------------------

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._one_starts, self._playwright, self._chromium = asyncio.Lock(), None, None
                threading.Thread(target=self._loop.run_forever, name="mrl-browser", daemon=True).start()
                atexit.register(self.close)
            return self._loop

    async def _running(self) -> Chromium:
        from playwright.async_api import Error, async_playwright

        assert self._one_starts is not None
        async with self._one_starts:
            if self._chromium is not None and self._chromium.is_connected():
                return self._chromium
            if not self.url:
                self.url = _serve(self.pages)
            if self._playwright is None:
                self._playwright = await async_playwright().start()
            try:
                self._chromium = await self._playwright.chromium.launch(
                    executable_path=self.executable,
                    args=_arguments(self.url),
                    # Root cannot have Chromium's own sandbox; the pages are files of this machine.
                    chromium_sandbox=os.geteuid() != 0,
                    timeout=START_SECONDS * 1000,
                )
            except Error as error:
                raise EnvError(f"{self.executable} does not start: {error}") from error
            self.starts += 1
            return self._chromium

    async def _stop(self) -> None:
        if self._chromium is not None:
            await self._chromium.close()
        if self._playwright is not None:
            await self._playwright.stop()


@cache
def shared(executable: str, pages: Path) -> Browser:
    """The browser of this process."""
    return Browser(executable, pages)


def find_chromium(given: str | None = None) -> str:
    """Chromium's path: the given one, that of MRL_CHROMIUM, or one that is installed. Raises EnvError."""
    named = given or os.environ.get("MRL_CHROMIUM")
    for name in (named,) if named else NAMES:
        if path := shutil.which(name):
            return path
    raise EnvError(
        f"there is no {named or 'Chromium'} here: install it (Debian: `apt-get install chromium`), or say where it is "
        "with MRL_CHROMIUM"
    )


def _arguments(url: str) -> list[str]:
    """url: of the pages. All else, also on this machine, goes to a proxy that there is not."""
    return [
        "--proxy-server=http://127.0.0.1:1",
        f"--proxy-bypass-list=<-loopback>;{url.removeprefix('http://')}",
        "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--disable-quic",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
    ]


def _serve(folder: Path) -> str:
    """Serves a folder's files to this machine, until the process ends. Returns where."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Files, directory=str(folder)))
    threading.Thread(target=server.serve_forever, name="mrl-pages", daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


class _Files(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # a page has a dozen files: they come over one connection
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:
        pass
