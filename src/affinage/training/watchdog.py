"""Notices that a step does not end, and says what every thread is at."""

import contextlib
import math
import threading
import time
from collections import deque
from pathlib import Path
from types import TracebackType

import numpy as np

from affinage.config.runtime import RuntimeSettings
from affinage.hardware.beats import AHEAD, Beats, Doing
from affinage.hardware.hosts import Hosts
from affinage.hardware.movement import Movement
from affinage.hardware.stacks import Stacks, needs_no_telling, say, told_without_python
from affinage.hardware.standstill import (
    ELSEWHERE,
    LAST_WORDS,
    TO_END,
    Standstill,
    looks_on,
    patience_of,
    stacks_in,
    stays_when_stuck,
)
from affinage.hardware.stops import Stops
from affinage.stopping import OwnProcess, leave
from affinage.training.ledger import LifeSign

_TIMES_P99 = 5.0
_REMEMBERED = 1000  # steps
_TO_KNOW = 40  # steps from which on their times tell how long one takes: the first ones are only given to the devices
_LOOK_EVERY = 0.2  # seconds
_LIFE_EVERY = 1.0  # seconds


class Watchdog:
    """A thread beside the loop. While entered, it shows that the run is alive, and expects a beat after every step.

    When none comes within max(hang_timeout, 5 x the 99th percentile of the steps before), it writes the stacks of all
    threads to stuck.txt, once for every step, and says so; of many hosts also which ones the others wait for. Then it
    leaves the process, see `stays_when_stuck`: a collective waits for ever. The first steps of a start, of which no
    times are known, have as long as `expects` says, if that is longer.

    What is not a step, such as a compilation, has more time: it is told after hang_timeout in which nothing moves (see
    `affinage.hardware.movement`), and after 20 times that in any case. Of many hosts one that shows no sign of life for
    hang_timeout is named by the others, whatever these are at by then, and left. A save that runs beside the steps is
    told like a step, and not left. Time in which this process was stopped itself is nobody's.
    """

    def __init__(self, name: str, folder: Path, settings: RuntimeSettings, life: LifeSign) -> None:
        self._name, self._folder, self._settings, self._life = name, folder, settings, life
        self._steps: deque[float] = deque(maxlen=_REMEMBERED)
        self._last, self._what, self._told, self._begun = time.monotonic(), "its start", False, 0
        self._patience = self._patience_to_leave = ELSEWHERE
        self._may_take = self._expected = 0.0
        self._blamed = self._silent = ""
        self._lost_told = False
        hosts = Hosts.current
        self._save = self._longest_save = 0.0  # seconds, as far as steps saw it
        self._save_told = False
        self._stacks = Stacks(stacks_in(folder))
        self._stays = stays_when_stuck(settings, hosts)
        self._told_at = 0.0
        self._movement, self._still_told, self._stops = Movement(), False, Stops()
        self._beats = Beats(hosts, self._doing)
        self._ended = threading.Event()
        every = min(_LOOK_EVERY, settings.hang_timeout / 4)
        self._thread = threading.Thread(
            target=looks_on, args=(self._look, self._ended, every, name), name="watchdog", daemon=True
        )
        self._alone = contextlib.ExitStack()

    def __enter__(self) -> "Watchdog":
        self._alone.enter_context(Standstill.looked_after_by_another())
        self._alone.enter_context(self._stops)
        self._thread.start()
        # Apart from the other, which must see that the disk does not answer.
        threading.Thread(target=self._live, name="life", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._beats.close()
        self._thread.join(TO_END)
        needs_no_telling()
        self._alone.close()  # who looks from here on sees a disk that does not answer
        self._life.show()

    def begins(
        self, what: str, *, told_after: float = ELSEWHERE, left_after: float = ELSEWHERE, may_take: float = 0.0
    ) -> None:
        """Something else than a step begins; after so many times the patience with a step it is told, and left.

        Where it may be told later than a step it is told as early if nothing moves. It is not left before `may_take`
        seconds, for what is longer the larger the model is.
        """
        self._begin(what, told_after, left_after, may_take)

    def expects(self, seconds: float) -> None:
        """A step may take so long, as far as one can know before there were any."""
        self._expected = seconds

    def step_begins(self, step: int) -> None:
        """A step begins, and what was before has ended."""
        before, since = self._what, self._last
        self._begin(f"step {step}", 1.0, 1.0)
        if before.startswith("step"):
            self._steps.append(self._last - since - self._stops.seconds_since(since))

    def save_lasts(self, seconds: float) -> None:
        """What the loop knows at a step: for how long the save beside the steps runs by now; 0 if none does."""
        seconds -= self._stops.seconds_since(time.monotonic() - seconds)
        if seconds < self._save:  # that one has ended
            self._longest_save, self._save_told = max(self._longest_save, self._save), False
        self._save = seconds
        limit = max(self._settings.hang_timeout, _TIMES_P99 * self._longest_save)
        if seconds > limit and not self._save_told:
            self._save_told = True
            self._stacks.tell(f"{self._name}: the save beside the steps has not ended for {seconds:.0f} s")

    def _begin(self, what: str, told_after: float, left_after: float, may_take: float = 0.0) -> None:
        self._last, self._what, self._told, self._blamed, self._silent = time.monotonic(), what, False, "", ""
        self._still_told, self._may_take = False, may_take
        Hosts.current.passed += 1
        self._patience, self._patience_to_leave = told_after, max(told_after, left_after)
        self._begun += 1

    @property
    def limit(self) -> float:
        """Seconds that what is running now may take until it is told."""
        return self._seconds(self._patience)

    def _seconds(self, patience: float) -> float:
        at_least = patience * self._settings.hang_timeout
        if not self._what.startswith("step"):
            return at_least
        steps = list(self._steps)
        slow = _TIMES_P99 * float(np.percentile(steps, 99)) if steps else 0.0
        return max(at_least, slow, self._expected if len(steps) < _TO_KNOW else 0.0)

    def _doing(self) -> Doing:
        # The first host looks always, and alone: it asks itself, and what all ask one grows with the square of them.
        waited = self._waited()
        still = min(self._movement.seconds, waited) if self._patience > 1 else 0.0
        late = waited > self.limit - AHEAD or still > self._settings.hang_timeout - AHEAD
        return Doing(Hosts.current.passed, self._what, late or Hosts.current.first, round(still, 1))

    def _waited(self) -> float:
        """Seconds since what is running now has begun."""
        last = self._last
        return time.monotonic() - last - self._stops.seconds_since(last)

    def _live(self) -> None:
        while not self._ended.wait(_LIFE_EVERY):
            self._life.show()

    def _look(self) -> None:
        patience = self._settings.hang_timeout
        told_without_python(patience)
        begun, waited = self._begun, self._waited()
        still = min(self._movement.look(), waited) if self._patience > 1 else 0.0
        self._look_for_life(waited)
        if not self._told and waited > self.limit:
            self._told, self._told_at = True, time.monotonic()
            self._tell(self._unended(waited))
        elif not self._told and waited > patience:
            self._look_closer(waited, still)
        if self._told and waited > max(self._stays, self._may_take, self._seconds(self._patience_to_leave)):
            ended = self._ended.wait(self._told_at + LAST_WORDS - time.monotonic())
            if not ended and self._begun == begun:  # what ended while the other hosts were asked is not left
                self._leave(self._unended(self._waited()) + self._blamed)

    def _look_for_life(self, waited: float) -> None:
        """At the other hosts: by how long they say nothing, not by when this one began what it is at."""
        patience = patience_of(self._settings)
        lost = self._beats.lost(patience)
        if lost and not (self._lost_told or self._silent or self._told):
            self._stacks.tell(f"{self._name}: {self._with(waited, lost)}")
        self._lost_told = bool(lost)
        if lost and self._stays < math.inf and not self._ended.wait(LAST_WORDS) and self._beats.lost(patience):
            self._leave(self._with(self._waited(), lost))

    def _look_closer(self, waited: float, still: float) -> None:
        """At what may take so long."""
        begun, silent = self._begun, self._beats.silent()
        if silent and not (self._silent or self._lost_told) and self._begun == begun:
            self._silent = silent
            self._stacks.tell(f"{self._name}: {self._with(waited, silent)}")
        elif still > patience_of(self._settings) and not (self._silent or self._still_told):
            self._still_told = True
            self._tell(f"nothing has moved for {still:.0f} s in {self._what}")

    def _unended(self, waited: float) -> str:
        return f"{self._what} has not ended for {waited:.0f} s"

    def _with(self, waited: float, lost: str) -> str:
        """What is missed, after what this host is at if that takes long, too."""
        return f"{self._unended(waited)}, and {lost}" if waited > self._settings.hang_timeout else lost

    def _tell(self, what: str) -> None:
        said, begun = f"{self._name}: {what}", self._begun
        self._stacks.tell(said)
        blamed = self._beats.blame()
        if blamed and self._begun == begun:
            self._blamed = f": {blamed}"
            say(f"{said}{self._blamed}")
            self._stacks.add(f"\n{said}{self._blamed}\n")

    def _leave(self, why: str) -> None:
        if OwnProcess.current is not None:
            leave(f"{self._name}: {why}")
