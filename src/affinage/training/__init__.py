"""Training: state in, state out. The loop, the optimizer, metrics, and stopping without losing anything."""

from affinage.training.loop import train
from affinage.training.trainer import Feed, TrainJob, ValidationSet, rows_per_step

__all__ = ["Feed", "TrainJob", "ValidationSet", "rows_per_step", "train"]
