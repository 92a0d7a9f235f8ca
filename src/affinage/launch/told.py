"""Being told to stop while watching over hosts: noted, or, where something is waited for, heard at once."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import ClassVar

from affinage.errors import Preempted
from affinage.stopping import ONE_PRESS, heeded


class Told:
    """While entered, notes the signals that ask this process to stop, where it may have handlers.

    Attributes:
        number: the last one's; None before.
        count: how often it was told, where signals within a second are one wish.
    """

    current: ClassVar["Told | None"] = None

    def __init__(self) -> None:
        self.number: signal.Signals | None = None
        self.count, self._counted = 0, float("-inf")
        self.interrupts = False

    def __enter__(self) -> "Told":
        self._cleanup = contextlib.ExitStack()
        if threading.current_thread() is threading.main_thread():
            for number in heeded():
                self._cleanup.callback(signal.signal, number, signal.signal(number, self._on_signal))
            Told.current = self
        return self

    def __exit__(self, *_: object) -> None:
        Told.current = None
        self._cleanup.close()

    def wait(self, seconds: float) -> bool:
        """Pause; whether it was to stop meanwhile."""
        until = time.monotonic() + seconds
        while not self.number and time.monotonic() < until:
            time.sleep(0.1)
        return self.number is not None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.number = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
        if time.monotonic() - self._counted > ONE_PRESS:
            self.count, self._counted = self.count + 1, time.monotonic()
        if self.interrupts:
            self.interrupts = False
            raise Preempted(f"told to stop by {self.number.name}")


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Inside, being told to stop raises Preempted: for what a launcher waits for, which may take hours."""
    told = Told.current
    if told is None:
        yield
        return
    if told.number:
        raise Preempted(f"told to stop by {told.number.name}")
    told.interrupts = True
    try:
        yield
    finally:
        told.interrupts = False
