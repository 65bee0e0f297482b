"""Experiment trackers: where a run is reported besides its own folder."""

from mrl.tracking.base import RunInfo, Tracker
from mrl.tracking.members import TRACKERS
from mrl.tracking.several import TrackerSet, check_trackers

__all__ = ["TRACKERS", "RunInfo", "Tracker", "TrackerSet", "check_trackers"]
