"""Verifiers in processes of their own, which can be ended.

A library that checks answers may take for ever on one, may set signal handlers, which only a main thread can, and may
evaluate what the model wrote. So it runs in a child process without files to write, sockets or programs to start, and
is killed when it takes too long. This is containment, not isolation: programs belong in the sandbox.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import select
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from typing import Any

from mrl.errors import RewardError

START_SECONDS = 120.0
"""A child imports its library first."""


class VerifierFailed(Exception):
    """A question got no answer: it took too long, or the child ended."""


class VerifierPool:
    """Child processes that call one function, `module:name`, with JSON in and out. Started when first asked.

    The module's `LIBRARIES` are imported before the first question.
    """

    def __init__(self, function: str, seconds: float, size: int | None = None) -> None:
        """seconds: for one call, after which the child is killed."""
        self.function, self.seconds = function, seconds
        self.size = size or max(min(4, (os.cpu_count() or 2) // 2), 1)
        self._idle: queue.Queue[_Child | None] = queue.Queue()
        for _ in range(self.size):
            self._idle.put(None)

    async def ask_all(self, questions: Sequence[dict[str, Any]]) -> list[Any]:
        """Each question's answer, or the VerifierFailed it ended with. Raises RewardError when no child starts."""
        return list(await asyncio.gather(*(asyncio.to_thread(self._ask, question) for question in questions)))

    def close(self) -> None:
        """End the children."""
        for _ in range(self.size):
            child = self._idle.get()
            if child is not None:
                child.kill()
            self._idle.put(None)

    def _ask(self, question: dict[str, Any]) -> Any:
        child = self._idle.get()
        try:
            if child is None or child.process.poll() is not None:  # or it ended since
                child = _Child(self.function)
            return child.ask(question, self.seconds)
        except VerifierFailed as failure:
            if child is not None:
                child.kill()
            child = None
            return failure
        finally:
            self._idle.put(child)


class _Child:
    """One process. It exits when this one does, because its stdin closes."""

    def __init__(self, function: str) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="mrl-verifier-")
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mrl.rewards.verifier_child", function],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=self.folder.name,
            env={
                "PYTHONPATH": path,
                "OMP_NUM_THREADS": "1",
                "PYTHONDONTWRITEBYTECODE": "1",
                "PATH": os.environ.get("PATH", ""),
            },
            start_new_session=True,
        )
        self.errors = b""
        threading.Thread(target=self._drain, name="mrl-verifier-errors", daemon=True).start()
        try:
            self._read(START_SECONDS)
        except VerifierFailed as failure:
            self.kill()
            said = self.errors.decode(errors="replace").strip()[-500:] or str(failure)
            raise RewardError(f"the verifier {function} does not start: {said}") from None

    def ask(self, question: dict[str, Any], seconds: float) -> Any:
        """Its answer. Raises VerifierFailed; the child is then of no use any more."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(question).encode() + b"\n")
            self.process.stdin.flush()
        except OSError:
            raise VerifierFailed("the verifier's process ended") from None
        return json.loads(self._read(seconds))

    def kill(self) -> None:
        """End it, whatever it does."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        self.folder.cleanup()

    def _read(self, seconds: float) -> bytes:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], seconds)
        if not ready:
            raise VerifierFailed(f"the verifier took longer than {seconds:g} s")
        line = self.process.stdout.readline()
        if not line.endswith(b"\n"):
            raise VerifierFailed("the verifier's process ended")
        return line

    def _drain(self) -> None:
        assert self.process.stderr is not None
        while chunk := os.read(self.process.stderr.fileno(), 65536):
            self.errors = (self.errors + chunk)[-4096:]
