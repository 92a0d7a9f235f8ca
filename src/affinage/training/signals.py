"""Being told to stop: a request that the loop honours between two steps, or at once where there is nothing to save."""

import contextlib
import faulthandler
import signal
import sys
import threading
import time
from types import FrameType, TracebackType

from affinage.hardware.hosts import Hosts
from affinage.stopping import ONE_PRESS, OwnProcess, heeded, leave
from affinage.training.agreement import Agreement


class StopRequest:
    """While entered, SIGTERM, SIGHUP and SIGINT set `signal_name` instead of ending the process.

    In a process of the run's own (`affinage.stopping.OwnProcess`) the process is left with status 75

    - at once, as long as there is nothing to save: in the start, the compilation, the restore;
    - `grace` seconds after SIGTERM or SIGHUP if the save has not come to its end by then, with all stacks on standard
      error; after SIGINT, which a person sends, who has time, not before a save on the slowest disk would have ended;

    and with status 130 by a second SIGINT. What a save that is cut off has written is not a checkpoint. Any other
    further signal changes nothing. In other processes, such as a notebook, a second SIGINT raises KeyboardInterrupt.

    Of many hosts it is enough that one is told: all of them stop between the same two steps.
    """

    def __init__(self, name: str, *, grace: float) -> None:
        self.signal_name = ""
        self._name, self._grace = name, grace
        self._something_to_lose, self._slowest_save = False, 0.0
        self._patience = grace
        self._told = 0.0
        self._counted_from: float | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._cleanup = contextlib.ExitStack()
        self._agreement: Agreement | None = None

    def __bool__(self) -> bool:
        return bool(self.signal_name)

    def agreed(self) -> bool:
        """Whether to stop here. Every host calls it at the same moments of the training, and gets the same answer."""
        return bool(self) if self._agreement is None else self._agreement.reached()

    @property
    def may_be_given_up(self) -> bool:
        """Whether a person waits, who can leave without the save."""
        return self.signal_name.startswith(signal.SIGINT.name)

    def seconds_left(self) -> float | None:
        """Until the process is left with what is not saved; None: it is not left."""
        if self._counted_from is None:
            return None
        return max(0.0, self._counted_from + self._patience - time.monotonic())

    def __enter__(self) -> "StopRequest":
        hosts = Hosts.current
        if hosts.count > 1:
            self._agreement = Agreement(hosts, self._name, self._on_word, self._on_left)
        if OwnProcess.current is not None:
            self._cleanup.enter_context(OwnProcess.current.listen(self._on_signal))
        elif threading.current_thread() is threading.main_thread():
            for number in heeded():
                self._cleanup.callback(signal.signal, number, signal.signal(number, self._in_main))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._cleanup.close()

    def something_to_lose(self, slowest_save: float) -> None:
        """From here on there are steps that no checkpoint has, and a save may take so many seconds."""
        with self._lock:
            self._something_to_lose, self._slowest_save = True, slowest_save

    def _on_signal(self, number: signal.Signals) -> None:
        with self._lock:
            first, self.signal_name = not self.signal_name, self.signal_name or number.name
            if not self._something_to_lose:
                self._leave_early(number.name)
        if first:
            self._told = time.monotonic()
            self._count_down(number.name)
            if self._agreement is not None:
                self._agreement.ask(f"{number.name} on host {Hosts.current.index}")
        elif number == signal.SIGINT and time.monotonic() - self._told > ONE_PRESS:
            leave(f"{self._name} stopped by a second {number.name}; it goes on from its last checkpoint", 130)

    def _on_word(self, why: str) -> None:
        """Some host was told to stop, this one or another."""
        with self._lock:
            first, self.signal_name = not self.signal_name, self.signal_name or why
            if not self._something_to_lose and OwnProcess.current is not None:
                self._leave_early(why)
        if first and OwnProcess.current is not None:
            self._count_down(why)

    def _on_left(self) -> None:
        if OwnProcess.current is not None:
            leave(f"{self._name} stopped by {self.signal_name} before a new step; nothing to save")

    def _leave_early(self, why: str) -> None:
        if self._agreement is not None:
            self._agreement.nothing_to_save(f"{why} on host {Hosts.current.index}")
        leave(f"{self._name} stopped by {why} before a new step; nothing to save")

    def _count_down(self, why: str) -> None:
        if why.startswith(signal.SIGINT.name):
            self._patience = max(self._grace, self._slowest_save)
        self._counted_from = time.monotonic()
        threading.Thread(target=self._limit, name="grace", daemon=True).start()

    def _limit(self) -> None:
        if not self._ended.wait(self._patience):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # there may be no standard error
                faulthandler.dump_traceback(sys.stderr.fileno())
            leave(f"{self._name} was not saved within {self._patience:.0f} s; it goes on from its last checkpoint")

    def _in_main(self, number: int, frame: FrameType | None) -> None:
        if self.signal_name and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal_name = signal.Signals(number).name
        if self._agreement is not None:
            self._agreement.ask(f"{self.signal_name} on host {Hosts.current.index}")
