"""Training: state in, state out. The loop, the optimizer, metrics, and stopping without losing anything."""

from affinage.training.job import Feed as Feed
from affinage.training.job import TrainJob as TrainJob
from affinage.training.job import ValidationSet as ValidationSet
from affinage.training.job import rows_per_step as rows_per_step
from affinage.training.loop import train as train
