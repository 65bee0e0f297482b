"""Servers that are started for a run: a process with an environment class or a command, and a container."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import httpx

from mrl.errors import EnvError
from mrl.rollouts.openenv.places import Dialling, Remote
from mrl.rollouts.openenv.sessions import Session
from mrl.system.threads import in_thread

LOG_LINES = 15
ENDING_SECONDS = 8.0
"""Longer than serve.py takes over ending what it watches."""


class Started(Remote):
    """A server that is started when the first session is opened, and anew when it has died by the next one."""

    def __init__(self, dialling: Dialling, name: str) -> None:
        super().__init__("", dialling, name)
        self.starting = asyncio.Lock()

    async def open(self) -> Session:
        async with self.starting:
            if self.url and not await self._alive():
                self.restarts += 1
                await self._end()
            if not self.url:
                try:
                    await self._start()
                except BaseException:
                    await self._end()
                    raise
        return await super().open()

    async def close(self) -> None:
        await self._end()

    async def _start(self) -> None:
        """Set `url`; it answers. Raises EnvError."""
        raise NotImplementedError

    async def _alive(self) -> bool:
        raise NotImplementedError

    async def _end(self) -> None:
        """Unset `url`."""
        raise NotImplementedError

    async def _healthy(self, url: str) -> bool:
        try:
            return (await self.dialling.get(url, "/health")).is_success
        except httpx.HTTPError:
            return False


class Subprocess(Started):
    """A process of its own.

    command: what it runs, given the port or, for serve.py, the socket. python: an interpreter of another environment;
    None = this one, or what the command names. env_vars: beside those of this process.
    """

    def __init__(
        self, dialling: Dialling, name: str, command: Callable[[socket.socket], list[str]], env_vars: dict[str, str],
        *, listens: bool, other: bool,
    ) -> None:  # fmt: skip
        super().__init__(dialling, name)
        self.command, self.env_vars, self.listens, self.other = command, env_vars, listens, other
        self.process: subprocess.Popen[bytes] | None = None
        self.log: BinaryIO | None = None

    async def _start(self) -> None:
        environment = dict(os.environ)
        if self.other:  # what is on our path is not of its environment
            environment.pop("PYTHONPATH", None)
            environment.pop("VIRTUAL_ENV", None)
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the process has ended
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            port = listening.getsockname()[1]
            if self.listens:
                listening.listen(2048)
            command = self.command(listening)
            if not self.listens:
                listening.close()
            try:
                self.process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=self.log,
                    stderr=self.log,
                    env=environment | self.env_vars,
                    pass_fds=(listening.fileno(),) if self.listens else (),
                    start_new_session=True,
                )
            except OSError as error:
                raise EnvError(f"{self.name}: {command[0]} does not start ({error.strerror})") from None
        url = f"http://127.0.0.1:{port}"
        await self._until_healthy(url)
        self.url = url

    async def _until_healthy(self, url: str) -> None:
        assert self.process is not None
        loop = asyncio.get_running_loop()
        end = loop.time() + self.dialling.timing.start
        while not await self._healthy(url):
            if self.process.poll() is not None:
                raise EnvError(
                    f"{self.name}: it ended with code {self.process.returncode} while it started.{self._said()}"
                )
            if loop.time() > end:
                raise EnvError(
                    f"{self.name}: it did not answer at {url}/health within {self.dialling.timing.start:g} s "
                    f"(start_timeout_s).{self._said()}"
                )
            await asyncio.sleep(0.05)

    async def _alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    async def _end(self) -> None:
        self.url = ""
        process, self.process = self.process, None
        log, self.log = self.log, None
        if process is not None:
            await in_thread(_end_process, process)
        if log is not None:
            log.close()

    def _said(self) -> str:
        assert self.log is not None
        self.log.seek(0)
        lines = self.log.read().decode(errors="replace").splitlines()[-LOG_LINES:]
        return " It said:\n" + "\n".join(lines) if lines else " It said nothing"


class Container(Started):
    """A container of an image, which one of OpenEnv's providers runs."""

    def __init__(
        self, dialling: Dialling, name: str, provider: Callable[[], Any], image: str, env_vars: dict[str, str]
    ) -> None:
        super().__init__(dialling, name)
        self.make_provider, self.image, self.env_vars = provider, image, env_vars
        self.provider: Any = None

    async def _start(self) -> None:
        try:
            self.provider = await in_thread(self.make_provider)
            url = await in_thread(lambda: self.provider.start_container(self.image, env_vars=self.env_vars or None))
            await in_thread(lambda: self.provider.wait_for_ready(url, timeout_s=self.dialling.timing.start))
        except Exception as error:  # providers raise what they like
            raise EnvError(f"{self.name}: the container does not start: {error}") from error
        self.url = url

    async def _alive(self) -> bool:
        return await self._healthy(self.url)

    async def _end(self) -> None:
        self.url = ""
        provider, self.provider = self.provider, None
        if provider is not None:
            await in_thread(provider.stop_container)


def class_command(
    env: str, python: str | None, sessions: int, arguments: dict[str, Any]
) -> Callable[[socket.socket], list[str]]:
    """Serves a class, named `file.py:Class` or `package.module:Class`."""
    script = str(Path(__file__).with_name("serve.py"))

    def command(listening: socket.socket) -> list[str]:
        own = ["--env", env, "--socket", str(listening.fileno()), "--sessions", str(sessions)]
        return [python or sys.executable, script, *own, "--arguments", json.dumps(arguments)]

    return command


def shell_command(given: str | list[str]) -> Callable[[socket.socket], list[str]]:
    """Runs a command, watched over by serve.py; `{port}` in it is the port to listen on."""
    script = str(Path(__file__).with_name("serve.py"))
    words = shlex.split(given) if isinstance(given, str) else [str(word) for word in given]

    def command(listening: socket.socket) -> list[str]:
        port = str(listening.getsockname()[1])
        return [sys.executable, script, "--", *(word.replace("{port}", port) for word in words)]

    return command


def _end_process(process: subprocess.Popen[bytes]) -> None:
    """Its standard input's end tells it; after some seconds it is killed."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(ENDING_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
