"""Whether what a training names exists, said with where it was named."""

from affinage.config.training import TrainSettings
from affinage.registry import Locate, build
from affinage.training.optimizer import OPTIMIZERS
from affinage.training.schedule import SCHEDULES


def check_choices(settings: TrainSettings, locate: Locate) -> None:
    """See that the optimizer and the schedule, and their own settings, are known.

    Args:
        settings: of the training.
        locate: from keys of the training's section, such as ("optimizer", "name"), to where they were written.

    Raises:
        UserError: for what nobody knows, and values that do not fit.
    """
    optimizer, schedule = settings.optimizer, settings.schedule
    build(OPTIMIZERS, optimizer.name, optimizer.settings, lambda path: locate(("optimizer", *path)))
    build(SCHEDULES, schedule.name, schedule.settings, lambda path: locate(("schedule", *path)))
