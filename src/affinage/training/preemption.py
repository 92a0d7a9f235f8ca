"""A signal to stop: the loop saves between two steps and ends, or at once if there is nothing to save."""

import contextlib
import faulthandler
import itertools
import signal
import sys
import threading
import time
from types import FrameType, TracebackType

from affinage.cluster.processes import Processes
from affinage.errors import EXIT_INTERRUPTED
from affinage.stopping import StopSignals, heeded, leave

_ONE_PRESS = 1.0  # seconds: signals closer than this are one, sent by a shell and a launcher
_TO_LEAVE = 2.0  # seconds of the grace period that are kept for the end
_points = itertools.count(1)  # moments at which a training could stop; the same in all processes


class PreemptionGuard:
    """While entered, SIGTERM, SIGHUP and SIGINT set `signal_name` instead of ending the process.

    Inside of `affinage.stopping.StopSignals` the process is left with status 75

    - at once, as long as there is nothing to save: in the start, the compilation, the restore;
    - `grace` seconds after SIGTERM or SIGHUP if the save has not ended by then, with all stacks on standard error;

    and with status 130 by a second SIGINT; after the first one the save has no limit. In other processes, such as a
    notebook, a second SIGINT raises KeyboardInterrupt. With several processes one signal to one of them is enough: JAX
    has all of them stop between the same two steps.
    """

    def __init__(self, name: str, *, grace: float) -> None:
        self.signal_name = ""
        self._name, self._grace = name, grace
        self._steps_to_lose = self._reached = False
        self._since: float | None = None
        self._cleanup = contextlib.ExitStack()

    def reached(self) -> bool:
        """Whether to stop here. All processes call it at the same moments of the training, and get the same answer."""
        if Processes.current.count == 1:
            return bool(self.signal_name)
        from jax.experimental import multihost_utils

        if multihost_utils.reached_preemption_sync_point(next(_points)):
            self._reached = True
            self._first(signal.SIGTERM, "a signal to another process")
        return self._reached

    @property
    def by_hand(self) -> bool:
        """Whether a person waits, who can leave without the save by a second Ctrl-C."""
        return self.signal_name == signal.SIGINT.name

    def seconds_left(self) -> float | None:
        """Return the seconds until what is not saved or copied should be given up; None: there is no limit."""
        if self._since is None or StopSignals.current is None or self.by_hand:
            return None
        return self._since + self._grace - _TO_LEAVE - time.monotonic()

    def leave_if_too_late(self) -> None:
        """Leave the process if the grace period is over; the watchdog's thread calls this every second."""
        left = self.seconds_left()
        if left is not None and left < -_TO_LEAVE:
            with contextlib.suppress(OSError, ValueError, AttributeError):  # there may be no standard error
                faulthandler.dump_traceback(sys.stderr.fileno())
            leave(f"{self._name} was not saved within {self._grace:.0f} s; the last checkpoint stays")

    def steps_to_lose(self) -> None:
        """From here on there are steps that no checkpoint has."""
        self._steps_to_lose = True

    def __enter__(self) -> "PreemptionGuard":
        if StopSignals.current is not None:
            self._cleanup.enter_context(StopSignals.current.listen(self._on_signal))
        elif threading.current_thread() is threading.main_thread():
            for number in heeded():
                self._cleanup.callback(signal.signal, number, signal.signal(number, self._in_main_thread))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._cleanup.close()
        if kind is None:  # the training is done, and what would follow it is not
            StopSignals.pending = self.signal_name

    def _on_signal(self, number: signal.Signals) -> None:
        if not self._steps_to_lose:
            leave(f"{self._name} received {number.name} before a new step; there is nothing to save")
        again = self._since is not None and time.monotonic() - self._since > _ONE_PRESS
        if again and number == signal.SIGINT:
            leave(f"{self._name} received a second {number.name}; the last checkpoint stays", EXIT_INTERRUPTED)
        self._first(number)

    def _first(self, number: signal.Signals, name: str = "") -> None:
        if not self.signal_name:
            self._since, self.signal_name = time.monotonic(), name or number.name
            Processes.current.notify_preemption()

    def _in_main_thread(self, number: int, frame: FrameType | None) -> None:
        if self.signal_name and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._first(signal.Signals(number))
