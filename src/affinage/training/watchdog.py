"""Notices that a step does not end, and says what every thread is at."""

import faulthandler
import sys
import threading
import time
from collections import deque
from pathlib import Path
from types import TracebackType

import numpy as np

from affinage.recipe.training import SurvivalSettings
from affinage.stopping import OwnProcess, leave
from affinage.training.ledger import LifeSign

FILE = "stuck.txt"
_TIMES_P99 = 5.0
_REMEMBERED = 1000  # steps
_ELSEWHERE = 20.0  # times longer anything but a step may take: a compilation, a save, a validation
_LOOK_EVERY = 1.0  # seconds


class Watchdog:
    """A thread beside the loop. While entered, it shows that the run is alive, and expects a beat after every step.

    When none comes within max(stuck_seconds, 5 x the 99th percentile of the steps before), it writes the stacks of all
    threads to stuck.txt and standard error, once for every step, and leaves the process if the settings say so.
    """

    def __init__(self, name: str, folder: Path, settings: SurvivalSettings, life: LifeSign) -> None:
        self._name, self._folder, self._settings, self._life = name, folder, settings, life
        self._steps: deque[float] = deque(maxlen=_REMEMBERED)
        self._last, self._what, self._told = time.monotonic(), "its start", False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self._life.show()

    def begins(self, what: str) -> None:
        """Something else than a step begins, which may take longer."""
        self._last, self._what, self._told = time.monotonic(), what, False

    def step_begins(self, step: int) -> None:
        """A step begins, and what was before has ended."""
        now = time.monotonic()
        if self._what.startswith("step"):
            self._steps.append(now - self._last)
        self._last, self._what, self._told = now, f"step {step}", False

    @property
    def limit(self) -> float:
        """Seconds that what is running now may take."""
        if not self._what.startswith("step"):
            return _ELSEWHERE * self._settings.stuck_seconds
        steps = list(self._steps)
        slow = float(np.percentile(steps, 99)) if steps else 0.0
        return max(self._settings.stuck_seconds, _TIMES_P99 * slow)

    def _watch(self) -> None:
        while not self._ended.wait(min(_LOOK_EVERY, self._settings.stuck_seconds / 4)):
            self._life.show()
            waited = time.monotonic() - self._last
            if not self._told and waited > self.limit:
                self._told = True
                self._tell(waited)

    def _tell(self, waited: float) -> None:
        said = f"{self._name}: {self._what} has not ended for {waited:.0f} s"
        with (self._folder / FILE).open("w", encoding="utf-8") as file:
            file.write(f"{said}\n\n")
            file.flush()
            faulthandler.dump_traceback(file)
        print(f"{said}; all stacks are in {self._folder / FILE}", file=sys.stderr, flush=True)
        if self._settings.leave_when_stuck and OwnProcess.current is not None:
            leave(said)
