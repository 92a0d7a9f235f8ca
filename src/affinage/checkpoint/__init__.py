"""Checkpoint: training states to disk and back, onto any mesh."""

from affinage.checkpoint.store import CheckpointStore as CheckpointStore
from affinage.checkpoint.store import CheckpointWarning as CheckpointWarning
