"""Trackers: who is told of a run besides its own folder."""

from mrl.registry import Registry
from mrl.tracking.base import RunInfo, Tracker

TRACKERS: Registry[type[Tracker]] = Registry("trackers", "report_to", {"console": "mrl.tracking.console:ConsoleTracker"})

__all__ = ["TRACKERS", "RunInfo", "Tracker"]
