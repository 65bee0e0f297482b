"""This side of one supervisor."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from mrl.errors import SandboxError
from mrl.sandbox import protocol
from mrl.sandbox.confine import scratch
from mrl.sandbox.confine.names import SETTINGS_ENV
from mrl.sandbox.protocol import Kind

GRACE_SECONDS = 25.0
"""How long past an execution's deadline its supervisor may take to answer before it is given up."""
START_SECONDS = 60.0
MAX_ANSWER = 1 << 30
"""Bytes: what programs print is limited each by itself."""
_LOADER = """
import os, sys, types
os.register_at_fork = lambda **handlers: None
package = types.ModuleType("mrl_sandbox")
package.__path__ = [sys.argv[1]]
sys.modules["mrl_sandbox"] = package
del sys.argv[1:]
from mrl_sandbox.engine import supervisor
supervisor.main()
"""


"""Handlers of forks (of `threading`, `random`, `logging`) touch some 180 pages, each of which a child then copies; the
one thread there is holds none of the locks that they are for."""


class Slot:
    """Used by one thread at a time; `interrupt` from any."""

    def __init__(self, layer: str, modules: tuple[str, ...], python: str) -> None:
        """Raises SandboxError when the layer cannot be entered here."""
        self.cancelled = False
        self.layer = layer
        self.socket, theirs = socket.socketpair()
        paths = module_paths(modules)
        self._folder = scratch.make() if layer == "unsafe" else ""
        settings = {"layer": layer, "modules": list(modules), "paths": paths, "folder": self._folder}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self.process = subprocess.Popen(
                [python, "-s", "-P", "-S", "-X", "utf8", "-c", _LOADER, str(Path(__file__).parents[1])],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                env={SETTINGS_ENV: json.dumps(settings), **ENVIRONMENT},
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            self.socket.close()
            self._errors.close()
            scratch.remove(self._folder)
            raise SandboxError(f"sandbox: cannot start {python}: {error}") from None
        finally:
            theirs.close()
        try:
            kind, body = self._receive(START_SECONDS)
        except SandboxError:
            self.stop()
            raise
        if kind is not Kind.READY:
            self.stop()
            raise SandboxError(f"sandbox: layer {layer} cannot be entered: {body.decode(errors='replace')}")

    def run(self, request: bytes, wall_seconds: float) -> dict[str, Any]:
        """Raises SandboxError when the supervisor is gone or does not answer."""
        try:
            self.socket.sendall(protocol.pack(Kind.REQUEST, request))
        except OSError as error:
            raise SandboxError(f"the sandbox's supervisor broke off: {self._last_words() or error}") from None
        return protocol.parse(self._receive(wall_seconds + GRACE_SECONDS)[1])

    def interrupt(self) -> None:
        """Make it kill what it runs and end. The thread that waits for its answer gets an error."""
        with contextlib.suppress(OSError):  # it is gone already
            self.socket.shutdown(socket.SHUT_RDWR)

    def stop(self) -> None:
        """Nothing of it is left afterwards."""
        self.interrupt()
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.socket.close()
        self._errors.close()
        scratch.remove(self._folder)  # the supervisor does too, if it still can

    def _receive(self, timeout: float) -> tuple[Kind, bytes]:
        try:
            self.socket.settimeout(timeout)
            received = bytearray()
            while True:
                part = self.socket.recv(1 << 18)
                if not part:
                    raise ConnectionResetError("connection closed")
                received += part
                message = protocol.take(received, MAX_ANSWER)
                if message is not None:
                    return message
        except TimeoutError:
            raise SandboxError(f"the sandbox's supervisor did not answer within {timeout:.0f} s") from None
        except OSError as error:
            raise SandboxError(f"the sandbox's supervisor broke off: {self._last_words() or error}") from None

    def _last_words(self) -> str:
        try:
            code = self.process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            return ""
        size = os.fstat(self._errors.fileno()).st_size
        words = os.pread(self._errors.fileno(), 2000, max(0, size - 2000)).decode("utf-8", "replace").strip()
        return f"exit code {code}: {words[-500:]}" if words else f"exit code {code}"


ENVIRONMENT = {
    "PYTHONHASHSEED": "0",  # which -I would not read: a program does the same thing every time
    "LC_ALL": "C.UTF-8",
    "MALLOC_ARENA_MAX": "2",
    "OPENBLAS_NUM_THREADS": "1",  # a library's threads would not survive the fork
    "OMP_NUM_THREADS": "1",
    "ARROW_DEFAULT_MEMORY_POOL": "system",  # its own takes address space by the gigabyte
    "MKL_NUM_THREADS": "1",
}


def module_paths(modules: tuple[str, ...]) -> list[str]:
    """The folders `modules` are imported from. Raises SandboxError for one that is not installed."""
    from importlib.util import find_spec

    paths = []
    for name in modules:
        spec = find_spec(name.partition(".")[0])
        if spec is None or spec.origin is None:
            raise SandboxError(f"sandbox: modules: {name!r} is not installed")
        paths.append(str(Path(spec.origin).parents[1 if spec.submodule_search_locations else 0]))
    return list(dict.fromkeys(paths))
