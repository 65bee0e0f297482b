"""Several trackers at once, none of which can stop or stall the run."""

from __future__ import annotations

import importlib.util
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from mrl.errors import ConfigError
from mrl.system.shell import command
from mrl.tracking.base import RunInfo, Tracker
from mrl.tracking.members import TRACKERS
from mrl.types import Outcome

MAX_WAITING = 1000
"""Calls held for a tracker that does not keep up; then the oldest are dropped."""

START_SECONDS = 30.0
"""How long the first `run_ids` waits for a tracker that is still starting."""

FINISH_SECONDS = 60.0
"""How long `finish` waits for all trackers together."""


def check_trackers(names: Iterable[str]) -> None:
    """Raise ConfigError for a tracker there is not, that is not installed, or that cannot work here."""
    for name in dict.fromkeys(names):
        tracker = TRACKERS.get(name)
        missing = [module for module in getattr(tracker, "requires", ()) if not _installed(module)]
        if missing:
            install = command("pip", "install", f"mrl[{name}]")
            raise ConfigError(f"report_to: {name} needs {', '.join(missing)}, which is not installed; {install}")
        if check := getattr(tracker, "check", None):
            check()


class TrackerSet:
    """The trackers of one run, by their names in `report_to`.

    say: told once of each tracker that fails, does not keep up or does not finish; always called on the thread that
    calls this object. Each tracker runs on a thread of its own, except those with `direct`.
    """

    def __init__(self, names: Iterable[str], say: Callable[[str], None]) -> None:
        self._say = say
        self._ids: dict[str, str] = {}
        self._messages: deque[str] = deque()
        self._trackers: list[_DirectTracker | _QueuedTracker] = []
        for name in dict.fromkeys(names):
            make = TRACKERS.get(name)
            kind = _DirectTracker if getattr(make, "direct", False) else _QueuedTracker
            self._trackers.append(kind(name, make, self._messages.append))

    def start(self, run: RunInfo) -> None:
        """Start every tracker; those on a thread of their own go on starting after this returned."""
        self._ids = dict(run.resume_ids)
        self._tell("start", run)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Pass a step's metrics on."""
        self._tell("log", step, dict(metrics))

    def note(self, message: str) -> None:
        """Pass a message on."""
        self._tell("note", message)

    def phase(self, name: str, detail: str = "") -> None:
        """Say what the run is doing now, and how far that is, to those who show it. May come before `start`."""
        for tracker in self._trackers:
            if tracker.shows_phases:
                tracker.phase(name, detail)

    def run_ids(self) -> dict[str, str]:
        """Tracker's name to its run's id, for the checkpoint: also of those that failed or are not used this time."""
        found = {tracker.name: run_id for tracker in self._trackers if (run_id := tracker.run_id())}
        return self._ids | found

    def finish(self, status: Outcome = "finished") -> None:
        """Let every tracker write out what it holds, for a bounded time. Does nothing the second time."""
        deadline = time.monotonic() + FINISH_SECONDS
        waiting = [tracker for tracker in self._trackers if isinstance(tracker, _QueuedTracker)]
        self._trackers = [tracker for tracker in self._trackers if not isinstance(tracker, _QueuedTracker)]
        for tracker in waiting:
            tracker.put("finish", status)
        for tracker in waiting:
            tracker.wait(deadline)
        self._ids |= {tracker.name: run_id for tracker in [*waiting, *self._trackers] if (run_id := tracker.run_id())}
        self._tell_messages()  # while there is still somebody to show them
        self._tell("finish", status)
        self._trackers = []

    def _tell(self, method: str, *args: Any) -> None:
        for tracker in self._trackers:
            tracker.put(method, *args)
        self._tell_messages()

    def _tell_messages(self) -> None:
        while self._messages:  # `say` may well call `note`, which comes back here
            self._say(self._messages.popleft())


class _DirectTracker:
    """A tracker that is called at once."""

    def __init__(self, name: str, make: Callable[[], Tracker], complain: Callable[[str], None]) -> None:
        self.name = name
        self._complain = complain
        self._make = make
        self._tracker: Tracker | None = None
        self._failed = False
        self.shows_phases = getattr(make, "direct", False) and hasattr(make, "phase")

    def put(self, method: str, *args: Any) -> None:
        """Call the tracker; after its first failure, nothing."""
        if self._failed or (self._tracker is None and method != "start"):
            return
        self._call(method, *args)

    def phase(self, name: str, detail: str) -> None:
        """Say what the run is doing; makes the tracker if it was not started yet."""
        if not self._failed:
            self._call("phase", name, detail)

    def _call(self, method: str, *args: Any) -> None:
        try:
            if self._tracker is None:
                self._tracker = self._make()
            getattr(self._tracker, method)(*args)
        except (Exception, SystemExit) as error:  # whatever a tracker raises is no reason to lose a run
            self._failed = True
            self._complain(f"tracker {self.name} failed and is left out: {type(error).__name__}: {error}")

    def run_id(self) -> str | None:
        """The tracker's id for the run, as far as it is known."""
        try:
            return None if self._tracker is None else self._tracker.run_id
        except Exception:  # it has none; why is said when it fails at its work
            return None


class _QueuedTracker(_DirectTracker):
    """A tracker on a thread of its own, with a queue that drops its oldest calls when it is full."""

    def __init__(self, name: str, make: Callable[[], Tracker], complain: Callable[[str], None]) -> None:
        super().__init__(name, make, complain)
        self._calls: deque[tuple[str, tuple[Any, ...]]] = deque()
        self._changed = threading.Condition()
        self._started = threading.Event()
        self._dropping = False
        self._may_wait = True
        self._thread: threading.Thread | None = None

    def put(self, method: str, *args: Any) -> None:
        """Hold the call for the thread. Never waits."""
        if method == "start":
            self._thread = threading.Thread(target=self._work, args=args, name=f"tracker-{self.name}", daemon=True)
            self._thread.start()
        elif self._thread is not None and not self._failed:
            with self._changed:
                if len(self._calls) >= MAX_WAITING:
                    self._calls.popleft()
                    if not self._dropping:
                        self._dropping = True
                        self._complain(f"tracker {self.name} does not keep up; its oldest rows are dropped")
                self._calls.append((method, args))
                self._changed.notify()

    def run_id(self) -> str | None:
        """As above; the first time, it waits for a tracker that is still starting."""
        if self._thread is not None and super().run_id() is None and self._may_wait:
            self._may_wait = self._started.wait(START_SECONDS)
        return super().run_id()

    def wait(self, deadline: float) -> None:
        """Wait for the thread to end. A daemon: what hangs does not keep the process."""
        self._may_wait = False
        if self._thread is None:
            return
        self._thread.join(max(deadline - time.monotonic(), 0.0))
        if self._thread.is_alive():
            self._complain(f"tracker {self.name} did not finish in {FINISH_SECONDS:.0f} s; rows may be lost")

    def _work(self, run: RunInfo) -> None:
        super().put("start", run)
        self._started.set()
        method = "start"
        while method != "finish" and not self._failed:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._calls))
                method, args = self._calls.popleft()
            super().put(method, *args)


def _installed(module: str) -> bool:
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None  # a mere folder of that name is no module
