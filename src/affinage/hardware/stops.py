"""For how long this process was stopped itself, which nobody in it can see but by a clock that has jumped."""

import contextlib
import time
from collections import deque
from collections.abc import Iterator

JUMP = 5.0  # seconds between two looks: this process was stopped (Ctrl-Z), or its machine; or no thread could run
_REMEMBERED = 100


class Stops:
    """The times at which all of this process stood, as a thread notes them that looks several times a second."""

    def __init__(self) -> None:
        self._looked = float("inf")  # when the last look ended; none has, or one lasts: inf
        self._found: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED)  # begin and end

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """Inside, the thread looks, however long that takes."""
        before, now = self._looked, time.monotonic()
        if now - before > JUMP:
            self._found.append((before, now))
        self._looked = float("inf")
        try:
            yield
        finally:
            self._looked = time.monotonic()

    def seconds_since(self, since: float) -> float:
        """Seconds of stops since `time.monotonic()` was `since`; from any thread, also before a stop was noted."""
        now, looked = time.monotonic(), self._looked
        found = [*tuple(self._found), *([(looked, now)] if now - looked > JUMP else [])]
        return sum(max(0.0, end - max(begin, since)) for begin, end in found)
