"""For how long this process was stopped itself, which nobody in it can see but by a clock that has jumped."""

import threading
import time
from collections import deque
from types import TracebackType

JUMP = 5.0  # seconds between two ticks: this process was stopped (Ctrl-Z), or its machine; or no thread could run
_TICK_EVERY = 0.2  # seconds
_REMEMBERED = 100


class Stops:
    """The times at which all of this process stood. While entered, a thread notes them that does nothing else.

    One that also looks at something, as at a disk that does not answer, could not tell its own waits from a stop.
    """

    def __init__(self) -> None:
        self._ticked = float("inf")  # when the thread ticked last; where it does not run: inf
        self._found: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED)  # begin and end
        self._lock = threading.Lock()  # around both: a stop is noted, or seen by its begin, and not counted twice
        self._ended = threading.Event()

    def __enter__(self) -> "Stops":
        self._ticked = time.monotonic()
        threading.Thread(target=self._tick, name="stops", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()

    def _tick(self) -> None:
        while not self._ended.wait(_TICK_EVERY):
            with self._lock:
                before, self._ticked = self._ticked, time.monotonic()
                if self._ticked - before > JUMP:
                    self._found.append((before, self._ticked))
        with self._lock:
            self._ticked = float("inf")

    def seconds_since(self, since: float) -> float:
        """Seconds of stops since `time.monotonic()` was `since`; from any thread, also before a stop was noted."""
        with self._lock:
            now = time.monotonic()
            found = [*self._found, *([(self._ticked, now)] if now - self._ticked > JUMP else [])]
        return sum(max(0.0, end - max(begin, since)) for begin, end in found)
