"""A progress line while a verb is at work."""

import re
import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

_COUNTED = re.compile(r"([\d,]+) of ([\d,]+)")
_NUMBER = re.compile(r"[\d,.]+")
_PERCENT = re.compile(r"(\d+(?:\.\d+)?) ?%")


class Working:
    """Shows on a terminal, on standard error, what is being done, for how long, and the time left.

    Use it as a context manager. The time left follows from the share in the words given to `progressed` ("30 of 90
    choices", "45%"). Without a terminal nothing is printed, or with `lines` one line for each new phase, whatever the
    numbers in it.
    """

    def __init__(self, name: str, console: "Console | None" = None, *, lines: bool = False) -> None:
        self._name, self._console, self._lines = name, console, lines
        self._phase = ""
        self._shown: Any = None
        self._stream = sys.stderr  # a library that is silenced meanwhile does not silence this

    def __enter__(self) -> "Working":
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        console = self._console or Console(file=sys.stderr)
        if console.is_terminal:
            description = TextColumn("{task.description}", markup=False)
            columns = (SpinnerColumn(), description, TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn())
            self._shown = Progress(*columns, console=console, transient=True)
            self._shown.start()
            self._task = self._shown.add_task(self._name, total=None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._shown is not None:
            self._shown.stop()
            self._shown = None

    def progressed(self, what: str) -> None:
        """Show `what`, a phase in words, perhaps with a share."""
        phase = _NUMBER.sub("", what)
        if self._shown is not None:
            share = share_in(what)
            if phase != self._phase:
                self._shown.reset(self._task)
            self._shown.update(self._task, description=f"{self._name}: {what}", completed=share or 0.0)
            self._shown.update(self._task, total=None if share is None else 1.0)
        elif self._lines and phase != self._phase:
            print(f"{self._name}: {what}", file=self._stream, flush=True)
        self._phase = phase


def share_in(what: str) -> float | None:
    """The share that words hold: "30 of 90" or "45%"; None without one."""
    if found := _COUNTED.search(what):
        done, whole = (int(number.replace(",", "")) for number in found.groups())
        return min(1.0, done / whole) if whole else None
    found = _PERCENT.search(what)
    return min(1.0, float(found[1]) / 100) if found else None
