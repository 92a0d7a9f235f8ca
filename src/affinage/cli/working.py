"""A line that moves while a verb is at work."""

import re
import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

from affinage.durations import duration

if TYPE_CHECKING:
    from rich.console import Console

_COUNTED = re.compile(r"([\d,]+) of ([\d,]+)")
_NUMBER = re.compile(r"[\d,.]+")
_PERCENT = re.compile(r"(\d+(?:\.\d+)?) ?%")
_SURE = 2.0  # seconds before what is left is told


class Working:
    """What is done, for how long, and how long yet: on a terminal, in standard error; elsewhere nothing, or `lines`.

    Use it as a context manager. What is left follows from the share that `progressed` is told in words ("30 of 90
    choices", "45%"); where that falls, something new has begun. With `lines`, where there is no terminal each new thing
    is a line of standard error, in words, whatever the numbers among them.
    """

    def __init__(self, name: str, console: "Console | None" = None, *, lines: bool = False) -> None:
        self._name, self._console, self._lines = name, console, lines
        self._told = ""
        self._shown: Any = None
        self._left = Left()
        self._stream = sys.stderr  # a library that is silenced meanwhile does not silence this

    def __enter__(self) -> "Working":
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        console = self._console or Console(file=sys.stderr)
        if console.is_terminal:
            columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
            self._shown = Progress(*columns, console=console, transient=True)
            self._shown.start()
            self._task = self._shown.add_task(self._name)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._shown is not None:
            self._shown.stop()
            self._shown = None

    def progressed(self, what: str) -> None:
        """It is told what is being done now."""
        left = self._left.after(what, time.monotonic())
        if self._shown is not None:
            told = f"{self._name}: {what}" + ("" if left is None else f", {duration(left)} left")
            self._shown.update(self._task, description=told)
        elif self._lines and (words := _NUMBER.sub("", what)) != self._told:
            self._told = words
            print(f"{self._name}: {what}", file=self._stream, flush=True)


class Left:
    """How long something still takes, by how long its parts took."""

    def __init__(self) -> None:
        self._begun: tuple[float, float] | None = None  # time and share
        self._share = 0.0

    def after(self, what: str, now: float) -> float | None:
        """Seconds that are left at the time `now`; None as long as nobody can say."""
        share = share_in(what)
        if share is None:
            self._begun = None
            return None
        if self._begun is None or share < self._share:
            self._begun = now, share
        self._share = share
        began, first = self._begun
        if share <= first or now - began < _SURE:
            return None
        return (now - began) * (1 - share) / (share - first)


def share_in(what: str) -> float | None:
    """The share that words tell: "30 of 90" or "45%"."""
    if found := _COUNTED.search(what):
        done, whole = (int(number.replace(",", "")) for number in found.groups())
        return min(1.0, done / whole) if whole else None
    found = _PERCENT.search(what)
    return min(1.0, float(found[1]) / 100) if found else None
