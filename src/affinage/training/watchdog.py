"""Notices that a step does not end, and says what every thread is at."""

import contextlib
import faulthandler
import sys
import threading
import time
from collections import deque
from pathlib import Path
from types import TracebackType

import numpy as np

from affinage.hardware.hosts import Hosts
from affinage.recipe.training import SurvivalSettings
from affinage.stopping import OwnProcess, leave
from affinage.training.beats import AHEAD, Beats, Doing
from affinage.training.ledger import LifeSign

FILE = "stuck.txt"
_TIMES_P99 = 5.0
_REMEMBERED = 1000  # steps
_ELSEWHERE = 20.0  # times longer anything but a step may take: a compilation, a save, a look at benchmarks
_LOOK_EVERY = 0.2  # seconds
_LIFE_EVERY = 1.0  # seconds
_DISK = 1.0  # seconds for the disk to take the stacks; else they go to standard error
_LAST_WORDS = 1.0  # seconds in which the other hosts, which began to wait a little later, can still ask this one


class Watchdog:
    """A thread beside the loop. While entered, it shows that the run is alive, and expects a beat after every step.

    When none comes within max(stuck_seconds, 5 x the 99th percentile of the steps before), it writes the stacks of all
    threads to stuck.txt, once for every step, and says so; of many hosts also which ones the others wait for. Then it
    leaves the process if the settings say so, which they do by themselves where there are many hosts: a collective
    waits for ever.
    """

    def __init__(self, name: str, folder: Path, settings: SurvivalSettings, life: LifeSign) -> None:
        self._name, self._folder, self._settings, self._life = name, folder, settings, life
        self._steps: deque[float] = deque(maxlen=_REMEMBERED)
        self._last, self._what, self._told, self._begun = time.monotonic(), "its start", False, 0
        self._patience = self._patience_to_leave = _ELSEWHERE
        self._blamed = ""
        hosts = Hosts.current
        self._file = folder / (FILE if hosts.first else f"stuck-{hosts.index}.txt")
        self._leaves = settings.leave_when_stuck if settings.leave_when_stuck is not None else hosts.count > 1
        self._told_at = 0.0
        self._beats = Beats(hosts, self._doing)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        # Apart from the other, which must see that the disk does not answer.
        threading.Thread(target=self._live, name="life", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._beats.close()
        self._thread.join()
        self._life.show()

    def begins(self, what: str, *, told_after: float = _ELSEWHERE, left_after: float = _ELSEWHERE) -> None:
        """Something else than a step begins; after so many times the patience with a step it is told, and left."""
        self._begin(what, told_after, left_after)

    def step_begins(self, step: int) -> None:
        """A step begins, and what was before has ended."""
        before, since = self._what, self._last
        self._begin(f"step {step}", 1.0, 1.0)
        if before.startswith("step"):
            self._steps.append(self._last - since)

    def _begin(self, what: str, told_after: float, left_after: float) -> None:
        self._last, self._what, self._told, self._blamed = time.monotonic(), what, False, ""
        self._patience, self._patience_to_leave = told_after, max(told_after, left_after)
        self._begun += 1

    @property
    def limit(self) -> float:
        """Seconds that what is running now may take until it is told."""
        return self._seconds(self._patience)

    def _seconds(self, patience: float) -> float:
        steps = list(self._steps) if self._what.startswith("step") else []
        slow = float(np.percentile(steps, 99)) if steps else 0.0
        return max(patience * self._settings.stuck_seconds, _TIMES_P99 * slow)

    def _doing(self) -> Doing:
        return Doing(self._begun, self._what, time.monotonic() - self._last > self.limit - AHEAD)

    def _live(self) -> None:
        while not self._ended.wait(_LIFE_EVERY):
            self._life.show()

    def _watch(self) -> None:
        while not self._ended.wait(min(_LOOK_EVERY, self._settings.stuck_seconds / 4)):
            begun, waited = self._begun, time.monotonic() - self._last
            if not self._told and waited > self.limit:
                self._told, self._told_at = True, time.monotonic()
                self._tell(waited)
            if self._told and self._leaves and waited > self._seconds(self._patience_to_leave):
                ended = self._ended.wait(self._told_at + _LAST_WORDS - time.monotonic())
                if not ended and self._begun == begun:  # what ended while the other hosts were asked is not left
                    self._leave(time.monotonic() - self._last)

    def _tell(self, waited: float) -> None:
        said, begun = f"{self._name}: {self._what} has not ended for {waited:.0f} s", self._begun
        written = self._write(f"{said}\n\n", stacks=True)
        # Whoever read it may be gone; the process is left all the same.
        with contextlib.suppress(OSError, ValueError):
            print(f"{said}; all stacks are {f'in {self._file}' if written else 'here'}", file=sys.stderr, flush=True)
            if not written:
                faulthandler.dump_traceback(sys.stderr.fileno())
        blamed = self._beats.blame()
        if blamed and self._begun == begun:
            self._blamed = f": {blamed}"
            with contextlib.suppress(OSError, ValueError):
                print(f"{said}{self._blamed}", file=sys.stderr, flush=True)
            self._write(f"\n{said}{self._blamed}\n")

    def _write(self, text: str, stacks: bool = False) -> bool:
        """Add to the file; whether the disk, which may be what everybody waits for, has taken it in time."""

        def write() -> None:
            with contextlib.suppress(OSError), self._file.open("a", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                if stacks:
                    faulthandler.dump_traceback(file)
                done.set()

        done = threading.Event()
        threading.Thread(target=write, name="stacks", daemon=True).start()
        return done.wait(_DISK)

    def _leave(self, waited: float) -> None:
        if OwnProcess.current is not None:
            leave(f"{self._name}: {self._what} has not ended for {waited:.0f} s{self._blamed}")
