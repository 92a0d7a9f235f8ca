"""Notices that a step does not end, and says what every thread is at."""

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections import deque
from pathlib import Path
from types import TracebackType

import numpy as np

from affinage.hardware.hosts import COORDINATOR, Hosts
from affinage.recipe.training import SurvivalSettings
from affinage.stopping import PARENT, OwnProcess, leave
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
    leaves the process if the settings say so, which they do by themselves where there are many hosts, or a launcher
    starts it again: a collective waits for ever.

    What is not a step, such as a compilation, has more time; of many hosts one that shows no sign of life in it is
    named after stuck_seconds all the same. A save that runs beside the steps is told like a step, and not left.
    """

    def __init__(self, name: str, folder: Path, settings: SurvivalSettings, life: LifeSign) -> None:
        self._name, self._folder, self._settings, self._life = name, folder, settings, life
        self._steps: deque[float] = deque(maxlen=_REMEMBERED)
        self._last, self._what, self._told, self._begun = time.monotonic(), "its start", False, 0
        self._patience = self._patience_to_leave = _ELSEWHERE
        self._stays = 0.0
        self._blamed = self._silent = ""
        hosts = Hosts.current
        self._save = self._longest_save = 0.0  # seconds, as far as steps saw it
        self._save_told = False
        self._file = folder / (FILE if hosts.first else f"stuck-{hosts.index}.txt")
        self._leaves = settings.leave_when_stuck if settings.leave_when_stuck is not None else _starts_again(hosts)
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

    def begins(
        self, what: str, *, told_after: float = _ELSEWHERE, left_after: float = _ELSEWHERE, may_take: float = 0.0
    ) -> None:
        """Something else than a step begins; after so many times the patience with a step it is told, and left.

        It is not left before `may_take` seconds, for what is longer the larger the model is.
        """
        self._begin(what, told_after, left_after, may_take)

    def step_begins(self, step: int) -> None:
        """A step begins, and what was before has ended."""
        before, since = self._what, self._last
        self._begin(f"step {step}", 1.0, 1.0)
        if before.startswith("step"):
            self._steps.append(self._last - since)

    def save_lasts(self, seconds: float) -> None:
        """What the loop knows at a step: for how long the save beside the steps runs by now; 0 if none does."""
        if seconds < self._save:  # that one has ended
            self._longest_save, self._save_told = max(self._longest_save, self._save), False
        self._save = seconds
        limit = max(self._settings.stuck_seconds, _TIMES_P99 * self._longest_save)
        if seconds > limit and not self._save_told:
            self._save_told = True
            self._tell_all(f"{self._name}: the save beside the steps has not ended for {seconds:.0f} s")

    def _begin(self, what: str, told_after: float, left_after: float, may_take: float = 0.0) -> None:
        self._last, self._what, self._told, self._blamed, self._silent = time.monotonic(), what, False, "", ""
        self._stays = may_take
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
        # The first host alone looks so early: it asks itself, and what all ask one grows with the square of the hosts.
        limit = self._settings.stuck_seconds if Hosts.current.first else self.limit
        return Doing(self._begun, self._what, time.monotonic() - self._last > limit - AHEAD)

    def _live(self) -> None:
        while not self._ended.wait(_LIFE_EVERY):
            self._life.show()

    def _watch(self) -> None:
        while not self._ended.wait(min(_LOOK_EVERY, self._settings.stuck_seconds / 4)):
            begun, waited = self._begun, time.monotonic() - self._last
            if not self._told and waited > self.limit:
                self._told, self._told_at = True, time.monotonic()
                self._tell(waited)
            elif not self._told and not self._silent and waited > self._settings.stuck_seconds:
                self._name_silent(waited)
            if self._told and self._leaves and waited > max(self._stays, self._seconds(self._patience_to_leave)):
                ended = self._ended.wait(self._told_at + _LAST_WORDS - time.monotonic())
                if not ended and self._begun == begun:  # what ended while the other hosts were asked is not left
                    self._leave(time.monotonic() - self._last)

    def _name_silent(self, waited: float) -> None:
        begun, silent = self._begun, self._beats.silent()
        if silent and self._begun == begun:
            self._silent = silent
            self._say(f"{self._name}: {self._what} has not ended for {waited:.0f} s, and {self._silent}")

    def _say(self, line: str) -> None:
        # Whoever read it may be gone; the process is left all the same.
        with contextlib.suppress(OSError, ValueError):
            print(line, file=sys.stderr, flush=True)

    def _tell(self, waited: float) -> None:
        said, begun = f"{self._name}: {self._what} has not ended for {waited:.0f} s", self._begun
        self._tell_all(said)
        blamed = self._beats.blame()
        if blamed and self._begun == begun:
            self._blamed = f": {blamed}"
            self._say(f"{said}{self._blamed}")
            self._write(f"\n{said}{self._blamed}\n")

    def _tell_all(self, said: str) -> None:
        """Tell it with the stacks of all threads."""
        written = self._write(f"{said}\n\n", stacks=True)
        self._say(f"{said}; all stacks are {f'in {self._file}' if written else 'here'}")
        if not written:
            with contextlib.suppress(OSError, ValueError, AttributeError):  # there may be no standard error
                faulthandler.dump_traceback(sys.stderr.fileno())

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


def _starts_again(hosts: Hosts) -> bool:
    """Whether somebody is taken to start this process again: `affinage launch`, or whoever starts many hosts."""
    return hosts.count > 1 or PARENT in os.environ or COORDINATOR in os.environ
