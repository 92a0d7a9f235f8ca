"""Trackers: where the metrics of a training go beside metrics.jsonl, without ever stopping or stalling it."""

from affinage.tracking.choice import tracker, trackers_of
from affinage.tracking.delivery import Trackers
from affinage.tracking.tracker import TrackedRun, Tracker

__all__ = ["TrackedRun", "Tracker", "Trackers", "tracker", "trackers_of"]
