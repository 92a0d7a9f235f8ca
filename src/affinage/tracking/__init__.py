"""Trackers: where the metrics of a training go beside metrics.jsonl, without ever stopping or stalling it."""

from affinage.tracking.trackers import TrackedRun, Tracker, Trackers, tracker, trackers_of

__all__ = ["TrackedRun", "Tracker", "Trackers", "tracker", "trackers_of"]
