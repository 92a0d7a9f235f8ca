"""Notices that a run does nothing, whatever it is at, and of many hosts that another one shows no sign of life."""

import contextlib
import math
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar

from affinage.hardware.beats import AHEAD, Beats, Doing
from affinage.hardware.hosts import COORDINATOR, Hosts, with_host
from affinage.hardware.movement import KNOWN, Movement, is_waiting
from affinage.hardware.stacks import Stacks, needs_no_telling, say, told_without_python
from affinage.stopping import PARENT, OwnProcess, leave

if TYPE_CHECKING:
    from affinage.config.runtime import RuntimeSettings

ELSEWHERE = 20.0  # times hang_timeout without a movement until a process is left
_ALONE = 3600.0  # seconds, at least, until one is left that nobody is known to start again
LAST_WORDS = 1.0  # seconds in which the other hosts, which began to wait a little later, can still ask this one
TO_END = 10.0  # seconds for a thread that looks on; one that writes to a disk that does not answer is not waited for
_FILE = "stuck.txt"
_LOOK_EVERY = 0.25  # seconds
_SEEN_LATER = 1.0  # seconds that a movement, or a sign of life, was there before it is seen at most


class Standstill:
    """A thread beside a run. While entered, it expects the run to move; see `affinage.hardware.movement`.

    Where nothing has moved for hang_timeout, it writes the stacks of all threads to stuck.txt and says so, once for
    each standstill; after 20 times that it leaves the process, see `stays_when_stuck`. It is no standstill to wait
    for another host, or for another process. Of many hosts all show signs of life meanwhile. The first one looks at
    all, the others at the first: one that gives none for hang_timeout is named, with the stacks of whoever misses it,
    and left as well.
    """

    current: ClassVar["Standstill | None"] = None

    def __init__(self, name: str, folder: Path, settings: "RuntimeSettings") -> None:
        self._name, self._hosts = name, Hosts.current
        self._patience, self._stuck_seconds = patience_of(settings), settings.hang_timeout
        self._stays = stays_when_stuck(settings, self._hosts)
        self._stacks = Stacks(stacks_in(folder))
        self._what, self._blamed = "the beginning", ""
        self._told, self._first_told, self._lost_told = False, False, False
        self._movement = Movement()

    def __enter__(self) -> "Standstill":
        if Standstill.current is None:
            Standstill.current = self
            self._begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if Standstill.current is self:
            Standstill.current = None
            self._end()

    @staticmethod
    @contextlib.contextmanager
    def looked_after_by_another() -> Iterator[None]:
        """Inside, whoever enters this watches the process, and says what it is at."""
        outer = Standstill.current
        if outer is None:
            yield
            return
        outer._end()
        try:
            yield
        finally:
            outer._begin()

    @staticmethod
    def sign(stage: str = "") -> None:
        """Something was done; or another stage has begun."""
        if Standstill.current is not None:
            Standstill.current._what = stage or Standstill.current._what
            Standstill.current._movement.sign()

    def _begin(self) -> None:
        self._told, self._first_told, self._lost_told = False, False, False
        self._ended, self._movement = threading.Event(), Movement()
        self._beats = Beats(self._hosts, self._doing)
        every = min(_LOOK_EVERY, self._patience / 4)
        self._thread = threading.Thread(
            target=looks_on,
            args=(self._look, self._ended, every, with_host(self._name)),
            name="standstill",
            daemon=True,
        )
        self._thread.start()

    def _end(self) -> None:
        self._ended.set()
        self._beats.close()
        self._thread.join(TO_END)
        needs_no_telling()

    def _doing(self) -> Doing:
        still = self._movement.seconds
        late = self._hosts.first or still > self._patience - AHEAD
        return Doing(self._hosts.passed, self._what, late, round(still, 1), waits=is_waiting())

    def _look(self) -> None:
        told_without_python(self._stuck_seconds)
        still = self._movement.look()
        if still <= self._patience:
            self._told = False
        elif not self._told:
            self._told = True
            self._tell(f"nothing has moved for {still:.0f} s in {self._what}")
        if self._told and KNOWN and still > max(self._stays, ELSEWHERE * self._stuck_seconds):
            self._leave(f"nothing has moved for {still:.0f} s in {self._what}{self._blamed}")
        self._look_at_others()

    def _look_at_others(self) -> None:
        patience = self._patience - _SEEN_LATER  # it is told by them, and seen by this one
        lost = self._beats.lost(patience)
        if lost and not self._lost_told:
            self._stacks.tell(f"{with_host(self._name)}: {lost}")
            self._ended.wait(LAST_WORDS)
            lost = self._beats.lost(patience)
        self._lost_told = bool(lost)
        if lost and self._stays < math.inf:
            self._leave(lost)
        first = self._beats.first_stands_still(self._patience) if is_waiting() else ""
        if first and not self._first_told:
            say(f"{with_host(self._name)}: {first}, where nothing moves")
        self._first_told = bool(first)

    def _tell(self, what: str) -> None:
        self._stacks.tell(f"{with_host(self._name)}: {what}")
        blamed = self._beats.blame()
        self._blamed = blamed and f": {blamed}"
        if blamed:
            said = f"{with_host(self._name)}: {what}{self._blamed}"
            say(said)
            self._stacks.add(f"\n{said}\n")

    def _leave(self, why: str) -> None:
        if OwnProcess.current is not None and not self._ended.is_set():
            leave(f"{self._name}: {why}")


def looks_on(look: Callable[[], None], ended: threading.Event, every: float, me: str) -> None:
    """Look every so many seconds until `ended`. What goes wrong with that is told, and it is looked again."""
    told = ""
    while not ended.wait(every):
        try:
            look()
        except Exception as error:
            said = f"{me}: who watches over it cannot look: {type(error).__name__}: {error}"
            if said != told:
                say(said)
            told = said


def patience_of(settings: "RuntimeSettings") -> float:
    """Seconds without a movement after which it is told: so that it is so, as seen once a second, in time."""
    return max(settings.hang_timeout - _SEEN_LATER, settings.hang_timeout / 2)


def stacks_in(folder: Path) -> Path:
    """The file in which this host tells its stacks."""
    hosts = Hosts.current
    return folder / (_FILE if hosts.first else f"stuck-{hosts.index}.txt")


def stays_when_stuck(settings: "RuntimeSettings", hosts: Hosts) -> float:
    """Seconds for which this process is not left, however patient one is with what it is at; infinity: never.

    By itself none where somebody is taken to start it again, which is `affinage launch`, or whoever starts many hosts.
    """
    if settings.exit_on_hang is not None:
        return 0.0 if settings.exit_on_hang else math.inf
    again = hosts.count > 1 or PARENT in os.environ or COORDINATOR in os.environ
    return 0.0 if again else _ALONE
