"""Ends a training that hangs, with the stacks of all threads, so that whoever started it starts it again."""

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from affinage.cluster.processes import COORDINATOR, Processes
from affinage.config.runtime import RuntimeSettings
from affinage.stopping import PARENT, StopSignals, leave

_EVERY = 1.0  # seconds between two looks
_TIMES_SLOWEST = 5.0  # of the slowest step so far, that a step may take
_STOPPED = 5.0  # seconds beyond `_EVERY`: the whole process was stopped (Ctrl-Z), or its machine slept
_NO_THREAD = 60.0  # seconds, at least, in which no thread of Python runs on a machine that is only busy


class Watchdog:
    """A thread beside the loop. While entered, it expects `beat` to be called before a limit.

    What takes longer than `hang_timeout`, and longer than its own limit, is reported once, with the stacks of all
    threads in hang.txt in the training's folder (hang-1.txt in process 1). Then the process is left with status 75 if
    somebody starts it again: `affinage launch`, or whoever starts several processes. `exit_on_hang` overrides that.
    If native code keeps every thread of Python from running, or the disk keeps this one, `faulthandler` writes the
    stacks to standard error and leaves with status 1. `each_second` is called in the thread.
    """

    def __init__(self, name: str, folder: Path, settings: RuntimeSettings, each_second: Callable[[], None]) -> None:
        self._name, self._timeout, self._each_second = name, settings.hang_timeout, each_second
        index = Processes.current.index
        self._file = folder / ("hang.txt" if index == 0 else f"hang-{index}.txt")
        started_again = Processes.current.count > 1 or PARENT in os.environ or COORDINATOR in os.environ
        self._leaves = started_again if settings.exit_on_hang is None else settings.exit_on_hang
        self._slowest = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self.beat("the start")

    def beat(self, phase: str, *, at_most: float = 0.0) -> None:
        """Something begins, and what was before has ended; `at_most`: seconds that it may take, if that is longer."""
        self._phase, self._since, self._reported = phase, time.monotonic(), False
        self._limit = max(self._timeout, at_most)

    def step(self, step: int) -> None:
        """A step begins; it may take five times as long as the slowest one before."""
        if self._phase.startswith("step "):
            self._slowest = max(self._slowest, time.monotonic() - self._since)
        self.beat(f"step {step}", at_most=_TIMES_SLOWEST * self._slowest)

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join(2 * _EVERY)
        if StopSignals.current is not None:
            faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        looked = time.monotonic()
        while not self._ended.wait(min(_EVERY, self._timeout / 4)):
            now = time.monotonic()
            if now - looked > _EVERY + _STOPPED:
                self._since += now - looked
            looked, waited = now, now - self._since
            leaves = self._leaves and StopSignals.current is not None
            # There may be no standard error, and no folder any more.
            with contextlib.suppress(OSError, ValueError, AttributeError):
                if leaves:  # unless this thread comes here again in time
                    seconds = max(_NO_THREAD, self._timeout, self._limit - waited)
                    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.stderr.fileno())
            self._each_second()
            if waited > self._limit and not self._reported:
                self._reported = True
                message = f"{self._name}: {self._phase} has not ended for {waited:.0f} s"
                with contextlib.suppress(OSError, ValueError, AttributeError):
                    print(f"{message}; all stacks are in {self._file}", file=sys.stderr, flush=True)
                    with self._file.open("a", encoding="utf-8") as file:
                        print(message, end="\n\n", file=file, flush=True)
                        faulthandler.dump_traceback(file)
                if leaves and not self._ended.is_set():
                    leave(message)
