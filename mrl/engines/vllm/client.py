"""An engine's own vLLM process: start, call, and clean shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any

from mrl.engines.vllm.memory import advice
from mrl.engines.vllm.process import wire
from mrl.engines.vllm.process.ending import end_group, shared_memory
from mrl.engines.vllm.watch import until_it_hangs
from mrl.errors import EngineDied, EngineError
from mrl.system import scratch

_LOG_LINES = 12
_ENDING_SECONDS = 10.0
_LAST_WORDS_SECONDS = 1.0


class VLLMProcess:
    """Runs `mrl.engines.vllm.process.host` and passes calls to it, from any thread.

    settings: arguments of vLLM's AsyncEngineArgs, plain data. version: of the initial weights. python: another
    environment's interpreter; None = this one. env: environment variables to set. start_timeout: seconds for the engine
    to start. stall_timeout: seconds without progress after which it counts as hung.

    Raises EngineError, with the end of the process's log, when it does not start.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        *,
        version: int,
        python: str | None,
        env: dict[str, str],
        start_timeout: float,
        stall_timeout: float,
    ) -> None:
        self.settings = settings
        self.folder = scratch.make("vllm", _short_folder())
        self.log = self.folder / "log.txt"
        self.pending: dict[int, asyncio.Future[Any]] = {}
        self.count = 0
        self.ended: str | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.group_ended = False
        self.shared: set[Path] = set()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="mrl-vllm", daemon=True)
        self.thread.start()
        try:
            self.facts: dict[str, Any] = self._run(self._start(settings, version, python, env), start_timeout)
        except FutureTimeout:
            tail = self._tail()
            self.close()
            raise EngineError(
                f"vLLM was not up after {start_timeout:.0f} s; raise vllm_start_timeout. Its log ends:\n{tail}"
            ) from None
        except BaseException:
            self.close()
            raise
        self.shared = shared_memory(self.pid)
        asyncio.run_coroutine_threadsafe(self._watch(stall_timeout), self.loop)

    @property
    def pid(self) -> int:
        """Of the host process; vLLM's own processes are in its process group."""
        assert self.process is not None
        return self.process.pid

    def submit(self, method: str, *args: Any) -> Future[Any]:
        """Call a method of the host. Raises EngineError when it refuses, EngineDied when the process is gone."""
        return asyncio.run_coroutine_threadsafe(self._call(method, args), self.loop)

    def call(self, method: str, *args: Any, timeout: float) -> Any:
        """`submit`, and wait at most `timeout` seconds for the result. Raises TimeoutError."""
        return self._run(self._call(method, args), timeout)

    def close(self) -> None:
        """End the process and every process it started. Calling it twice is allowed."""
        self.ended = self.ended or "this vLLM engine was closed"
        if self.thread.is_alive():
            self._run(self._disconnect(), _ENDING_SECONDS)
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join()
            self.loop.close()
        if self.process is not None and not self.group_ended:
            with contextlib.suppress(subprocess.TimeoutExpired):  # if it hangs it is killed below
                self.process.wait(_ENDING_SECONDS)
            self._end_group()
        scratch.remove(self.folder)

    # --- on the loop ------------------------------------------------------------------------------------------------

    async def _start(
        self, settings: dict[str, Any], version: int, python: str | None, env: dict[str, str]
    ) -> dict[str, Any]:
        # The other environment has no mrl: a folder with nothing but a link to this one goes on its path.
        (self.folder / "mrl").symlink_to(Path(__file__).resolve().parents[2], target_is_directory=True)
        inherited = [] if python is not None else [p for p in (os.environ.get("PYTHONPATH"),) if p]
        environment = {
            "TORCHINDUCTOR_CACHE_DIR": f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            **os.environ,
            **env,
            "TMPDIR": str(self.folder),  # vLLM leaves its sockets in the temporary folder
            "PYTHONPATH": os.pathsep.join([str(self.folder), *inherited]),
        }
        if python is not None:
            environment.pop("VIRTUAL_ENV", None)
        socket = str(self.folder / "s")
        connected: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = self.loop.create_future()
        server = await asyncio.start_unix_server(lambda r, w: connected.set_result((r, w)), socket)
        command = [python or sys.executable, "-m", "mrl.engines.vllm.process.host", socket]
        try:
            with self.log.open("wb") as log:
                self.process = subprocess.Popen(
                    command,
                    env=environment,
                    cwd=self.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        except OSError as error:
            raise EngineError(f"vllm_python: {command[0]} does not start ({error.strerror})") from None
        while not connected.done():
            if self.process.poll() is not None:
                raise self._not_up("vLLM's process ended at once")
            await asyncio.wait([connected], timeout=0.05)
        server.close()
        reader, self.writer = connected.result()
        wire.write(self.writer, {"settings": settings, "version": version})
        try:
            first = await wire.read(reader)
        except (asyncio.IncompleteReadError, ConnectionError):
            raise self._not_up("vLLM's process ended while it started") from None
        if "failed" in first:
            raise self._not_up(f"vLLM does not start: {first['failed']}")
        self.reading = self.loop.create_task(self._read(reader))
        return dict(first["ready"])

    async def _call(self, method: str, args: tuple[Any, ...]) -> Any:
        if self.ended is not None:
            raise EngineDied(self.ended)
        self.count += 1
        number = self.count
        future = self.pending[number] = self.loop.create_future()
        wire.write(self.writer, {"id": number, "method": method, "args": args})
        try:
            return await future
        except asyncio.CancelledError:
            if self.ended is None:
                wire.write(self.writer, {"cancel": number})
            raise
        finally:
            self.pending.pop(number, None)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                message = await wire.read(reader)
                future = self.pending.get(message["id"])
                if future is None or future.done():
                    continue
                if "error" not in message:
                    future.set_result(message["result"])
                elif message["kind"] == "dead":
                    self._gone(f"vLLM died: {message['error']}")
                else:
                    future.set_exception(EngineError(message["error"]))
        except (asyncio.IncompleteReadError, ConnectionError):
            self._gone("the vLLM process died")

    async def _watch(self, stall_timeout: float) -> None:
        with contextlib.suppress(EngineError):  # the process is gone; waiting calls have been told
            how = await until_it_hangs(lambda: self._call("pulse", ()), stall_timeout)
            self._gone(f"vLLM hangs: {how} (vllm_stall_timeout); it was killed")

    def _gone(self, what: str) -> None:
        """End the remaining processes; fail pending calls, and all later ones, with EngineDied."""
        if self.ended is not None:
            return
        code = self._exit_code()
        self.ended = self._explained(what, code)
        self._end_group()
        for future in self.pending.values():
            if not future.done():
                future.set_exception(EngineDied(self.ended))

    async def _disconnect(self) -> None:
        reading = getattr(self, "reading", None)
        if reading is not None:
            self.writer.close()
            reading.cancel()
        for future in self.pending.values():
            if not future.done():
                future.set_exception(EngineDied("the engine was closed"))
        await asyncio.sleep(0)  # let pending calls receive the exception
        for task in asyncio.all_tasks():
            if task is not asyncio.current_task():
                task.cancel()

    # --- small things -----------------------------------------------------------------------------------------------

    def _run(self, work: Coroutine[Any, Any, Any], timeout: float) -> Any:
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result(timeout)
        except FutureTimeout:
            future.cancel()
            raise

    def _end_group(self) -> None:
        assert self.process is not None
        end_group(self.process.pid, self.shared)
        self.process.wait()
        self.group_ended = True  # from now on another process may get its pid

    def _exit_code(self) -> int | None:
        """The exit code if the process ends by itself within a second; None if it keeps running."""
        assert self.process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(_LAST_WORDS_SECONDS)
        return None

    def _not_up(self, what: str) -> EngineError:
        return EngineError(self._explained(what, self._exit_code()))

    def _explained(self, what: str, exit_code: int | None) -> str:
        """The message with the end of the log, and advice if memory was lacking."""
        change = advice(f"{what}\n{self._said()}", exit_code, self.settings)
        return f"{what}{'' if change is None else f' ({change})'}. Its log ends:\n{self._tail()}"

    def _said(self) -> str:
        try:
            return self.log.read_text(errors="replace")
        except OSError:
            return ""

    def _tail(self) -> str:
        return "\n".join(self._said().splitlines()[-_LOG_LINES:]) or "(empty log)"


def _short_folder() -> Path | None:
    """A folder with a short path: paths of Unix sockets may have 107 bytes, and vLLM adds 37 to the folder's."""
    return Path("/tmp") if len(tempfile.gettempdir()) > 50 else None
