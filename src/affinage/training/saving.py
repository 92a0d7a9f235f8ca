"""When the state of a run is saved."""

import time

from affinage.cluster.processes import Processes
from affinage.config.runtime import CheckpointSettings

_STEPS_BETWEEN_QUESTIONS = 10  # many hosts must agree on what the clock says, which costs a message


class SaveRhythm:
    """Says after which steps to save: every so many, every so many minutes, and the last."""

    def __init__(self, settings: CheckpointSettings, steps: int) -> None:
        self._settings, self._steps = settings, steps
        self.saved()

    def saved(self) -> None:
        """A save has begun."""
        self._last = time.monotonic()

    def due(self, step: int) -> bool:
        """Whether the state after `step` steps is to be saved; the same on every host."""
        return step % self._settings.every_steps == 0 or step == self._steps or self._long_ago(step)

    def _long_ago(self, step: int) -> bool:
        minutes = self._settings.every_minutes
        if minutes is None:
            return False
        long_ago = time.monotonic() - self._last >= 60 * minutes
        if Processes.current.count == 1:
            return long_ago
        return step % _STEPS_BETWEEN_QUESTIONS == 0 and bool(
            Processes.current.broadcast("a save by the clock", long_ago)
        )
