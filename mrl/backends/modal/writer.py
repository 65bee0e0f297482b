"""One writer per run whose loop is at Modal: an entry in a Dict of Modal's, kept fresh while it writes.

The lock of a run's folder (mrl.store.lock) is the container's own there, and says nothing to others.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

from mrl.errors import StoreError

STALE_SECONDS = 60.0
"""After so long without a sign of life a loop counts as gone: Modal ended it, and starts it nowhere else."""


class Writer:
    """The right to write a run. One run's loop keeps its `session` in every container that Modal makes for it.

    volume: its name; the Dict is called after it. who: the process that started the run, for people. Can be pickled.
    """

    def __init__(self, volume: str, run: str, session: str, who: str) -> None:
        self.volume, self.run, self.session, self.who = volume, run, session, who

    def refuse(self) -> None:
        """Raises StoreError, naming the process, when another run's loop has it; and OSError."""
        with self._entries() as entries:
            self._refuse(entries.get(self.run))

    def take(self) -> None:
        """Raises as `refuse`."""
        with self._entries() as entries:
            while not entries.put(self.run, self._entry(), skip_if_exists=True):
                found = entries.get(self.run)
                self._refuse(found)
                # Of two that find the same old entry, one takes away what the other has put, and gives it back.
                removed = entries.pop(self.run, None)
                if removed is not None and removed != found:
                    entries.put(self.run, removed, skip_if_exists=True)

    def stay(self) -> bool:
        """Say that it is still there. False = another one has taken it meanwhile. Raises OSError."""
        with self._entries() as entries:
            found = entries.get(self.run)
            if found is not None and found["session"] != self.session:
                return False
            entries.put(self.run, self._entry())
            return True

    def release(self) -> None:
        """Let others write. Raises OSError."""
        with self._entries() as entries:
            found = entries.get(self.run)
            if found is not None and found["session"] == self.session:
                entries.pop(self.run, None)

    @contextlib.contextmanager
    def _entries(self) -> Iterator[Any]:
        import modal

        try:
            yield modal.Dict.from_name(f"{self.volume}-writers", create_if_missing=True)
        except modal.exception.Error as error:
            raise OSError(f"Modal's Dict: {error}") from error

    def _entry(self) -> dict[str, Any]:
        return {"session": self.session, "who": self.who, "time": time.time()}

    def _refuse(self, found: dict[str, Any] | None) -> None:
        if found is None or found["session"] == self.session:
            return
        silent = time.time() - found["time"]
        if silent < STALE_SECONDS:
            raise StoreError(
                f"run_name: the run {self.run!r} on Modal's Volume is being written by a loop there, of "
                f"{found['who']}, last seen {max(0.0, silent):.0f} s ago; wait for it, end it (it counts as gone after "
                f"{STALE_SECONDS:.0f} s), or choose another run_name"
            )


def this_process() -> str:
    """For people."""
    return f"process {os.getpid()} on {socket.gethostname()}"
