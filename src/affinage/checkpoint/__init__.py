"""Checkpoint: training states to disk and back, onto any mesh, with checksums of their arrays."""

from affinage.checkpoint.store import CheckpointStore as CheckpointStore
from affinage.checkpoint.store import CheckpointWarning as CheckpointWarning
