"""What may end a training between two lines of its loop: a signal to stop, and a step that hangs."""

import contextlib
import faulthandler
import itertools
import math
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from types import FrameType

from affinage.cluster.processes import COORDINATOR, Processes
from affinage.config.recipe import RuntimeSettings
from affinage.errors import EXIT_INTERRUPTED, Preempted
from affinage.stopping import ONE_PRESS, PARENT, SIGNALS, StopSignals, handled_by, leave

_EVERY = 1.0  # seconds between two looks
_TO_LEAVE = 2.0  # seconds of the grace period that are kept for the end
_TIMES_SLOWEST = 5.0  # of the slowest step so far, that a step may take
_STOPPED = 5.0  # seconds beyond `_EVERY`: the whole process was stopped (Ctrl-Z), or its machine slept
_NO_THREAD = 60.0  # seconds, at least, in which no thread of Python runs on a machine that is only busy
_NO_STREAM = OSError, ValueError, AttributeError  # there is no standard error, or no folder any more
_points = itertools.count(1)  # moments at which a training could stop; the same in all processes


class Watchdog:
    """While entered, heeds signals to stop, and has a thread beside the loop that expects `beat` before a limit.

    SIGTERM, SIGHUP and SIGINT set `signal_name`: the loop saves between two steps and ends. Inside of
    `affinage.stopping.StopSignals` the process is left with status 75, at once while there is nothing to save, or
    `preemption_grace` seconds after SIGTERM or SIGHUP; and with 130 by a second SIGINT. In other processes, such as a
    notebook, a second SIGINT raises KeyboardInterrupt.

    What takes longer than `hang_timeout`, and longer than its own limit, is reported once, with the stacks of all
    threads in hang.txt in the training's folder (hang-1.txt in process 1). Then the process is left with status 75 if
    `affinage launch`, or whoever starts several processes, starts it again. If native code or the disk keeps this
    thread from running, `faulthandler` writes the stacks to standard error and leaves with status 1.
    """

    def __init__(self, name: str, folder: Path, settings: RuntimeSettings) -> None:
        self.signal_name = ""
        self.steps_to_lose = False  # whether there are steps that no checkpoint has
        self._name, self._grace, self._timeout = name, settings.preemption_grace, settings.hang_timeout
        self._reached, self._signalled = False, 0.0
        self._pressed = float("inf")  # when the thread saw the first signal
        self._wakeup: socket.socket | None = None  # gets the number of every signal, also during native code
        self._cleanup = contextlib.ExitStack()
        index = Processes.current.index
        self._file = folder / ("hang.txt" if index == 0 else f"hang-{index}.txt")
        self._pause = 5.0 if index == 0 and Processes.current.count > 1 else 0.0  # JAX ends all when process 0 leaves
        self._restarted = Processes.current.count > 1 or PARENT in os.environ or COORDINATOR in os.environ
        self._slowest = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self.beat("the start")

    def __enter__(self) -> "Watchdog":
        self._cleanup.enter_context(handled_by(self._in_main_thread))
        if StopSignals.current is not None and threading.current_thread() is threading.main_thread():
            self._wakeup, writer = map(self._cleanup.enter_context, socket.socketpair())
            self._wakeup.setblocking(False)
            writer.setblocking(False)
            before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
            self._cleanup.callback(signal.set_wakeup_fd, before)
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        self._ended.set()
        self._thread.join(2 * _EVERY)
        if StopSignals.current is not None:
            faulthandler.cancel_dump_traceback_later()
            if self.signal_name and (error is None or isinstance(error, Preempted)):  # what would follow is not done
                StopSignals.current.note(self.signal_name, str(error or ""))
        self._cleanup.close()  # last: a launcher, which sends its signal to all, may send one more

    # ---- for the loop ----

    def reached(self) -> bool:
        """Whether to stop here. All processes call it at the same moments of the training, and get the same answer."""
        if Processes.current.count == 1:
            return bool(self.signal_name)
        from jax.experimental import multihost_utils

        if multihost_utils.reached_preemption_sync_point(next(_points)):
            self._reached = True
            self._first("a signal to another process")
        return self._reached

    def seconds_left(self) -> float:
        """Return the seconds until what is not saved or copied should be given up; inf: there is no limit."""
        if self.signal_name in ("", "SIGINT") or StopSignals.current is None:
            return math.inf
        return self._signalled + self._grace - _TO_LEAVE - time.monotonic()

    def beat(self, phase: str, *, at_most: float = 0.0) -> None:
        """Something begins, and what was before has ended; `at_most`: seconds that it may take, if that is longer."""
        self._phase, self._since, self._reported = phase, time.monotonic(), False
        self._limit = max(self._timeout, at_most)

    def step(self, step: int) -> None:
        """A step begins; it may take five times as long as the slowest one before."""
        if self._phase.startswith("step "):
            self._slowest = max(self._slowest, time.monotonic() - self._since)
        self.beat(f"step {step}", at_most=_TIMES_SLOWEST * self._slowest)

    # ---- beside it ----

    def _in_main_thread(self, number: int, frame: FrameType | None) -> None:
        if self.signal_name and number == signal.SIGINT and self._wakeup is None:
            raise KeyboardInterrupt
        self._first(signal.Signals(number).name)

    def _first(self, name: str) -> None:
        if not self.signal_name:
            self._signalled, self.signal_name = time.monotonic(), name
            Processes.current.notify_preemption()

    def _watch(self) -> None:
        """What the thread does until the end."""
        looked = time.monotonic()
        while not self._ended.wait(min(_EVERY, self._timeout / 4)):
            now = time.monotonic()
            if now - looked > _EVERY + _STOPPED:
                self._since += now - looked
            looked, waited = now, now - self._since
            leaves = self._restarted and StopSignals.current is not None
            with contextlib.suppress(*_NO_STREAM):
                if leaves:  # unless this thread comes here again in time
                    seconds = max(_NO_THREAD, self._timeout, self._limit - waited)
                    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.stderr.fileno())
            self._leave_by_signal()
            if waited > self._limit and not self._reported:
                self._reported = True
                message = f"{self._name}: {self._phase} has not ended for {waited:.0f} s"
                with contextlib.suppress(*_NO_STREAM):
                    print(f"{message}; all stacks are in {self._file}", file=sys.stderr, flush=True)
                    with self._file.open("a", encoding="utf-8") as file:
                        print(message, end="\n\n", file=file, flush=True)
                        faulthandler.dump_traceback(file)
                if leaves and not self._ended.wait(self._pause):
                    leave(message)

    def _leave_by_signal(self) -> None:
        """Leave the process where a signal requires it: its handler waits, maybe for minutes, for native code."""
        numbers = b""
        if self._wakeup is not None:
            with contextlib.suppress(OSError):  # there was none
                numbers = self._wakeup.recv(16)
        for number in (number for number in SIGNALS if number in numbers):
            if not self.steps_to_lose:
                leave(f"{self._name} received {number.name} before a new step; there is nothing to save")
            if number == signal.SIGINT and time.monotonic() - self._pressed > ONE_PRESS:
                leave(f"{self._name} received a second {number.name}; the last checkpoint stays", EXIT_INTERRUPTED)
            self._pressed = min(self._pressed, time.monotonic())
            self._first(number.name)
        if self.seconds_left() < -_TO_LEAVE:
            with contextlib.suppress(*_NO_STREAM):
                faulthandler.dump_traceback(sys.stderr.fileno())
            leave(f"{self._name} was not saved within {self._grace:.0f} s; the last checkpoint stays")
