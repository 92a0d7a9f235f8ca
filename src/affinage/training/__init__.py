"""Training: state in, state out. The loop, the optimizer, metrics, and stopping without losing anything."""

from affinage.training.loop import train as train
from affinage.training.trainer import Feed as Feed
from affinage.training.trainer import TrainJob as TrainJob
from affinage.training.trainer import ValidationSet as ValidationSet
from affinage.training.trainer import rows_per_step as rows_per_step
