"""`trackio`: Hugging Face's tracker, on this machine or on a Space.

Its own settings hold: TRACKIO_PROJECT (else `mrl`), TRACKIO_DIR, TRACKIO_SPACE_ID, TRACKIO_SERVER_URL.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import uuid

from mrl.tracking.base import RunInfo
from mrl.types import Outcome


class TrackioTracker:
    """One trackio run per run, continued under the same id. Rows it already has are not sent again."""

    requires = ("trackio",)
    run_id: str | None = None

    def start(self, run: RunInfo) -> None:
        import trackio

        _print_to_stderr()
        wanted = run.resume_ids.get("trackio")
        self.run_id = wanted or uuid.uuid4().hex
        self.run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", "mrl"),
            name=run.name,
            config=run.config,
            resume="allow" if wanted else "never",
            embed=False,
        )
        # trackio finds a run by its name, which another run may have as well, and takes no id.
        self.next_step = self.run._next_step if self.run.id == wanted else 0
        self.run.id = self.run_id

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if step >= self.next_step:
            self.run.log(dict(metrics), step=step)

    def note(self, message: str) -> None:
        """Nothing: trackio has no place for text but its alerts."""

    def finish(self, status: Outcome = "finished") -> None:
        self.run.finish()


def _print_to_stderr() -> None:
    """trackio prints what it does to stdout, which holds the command's results.

    Redirecting stdout would do it for the whole process, and from this thread.
    """
    for name in ("trackio", "trackio.run", "trackio.utils"):
        vars(importlib.import_module(name))["print"] = functools.partial(print, file=sys.stderr)
