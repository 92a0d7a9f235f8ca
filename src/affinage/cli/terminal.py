"""Where the verbs print what people read: coloured on a terminal, plain and in whole lines everywhere else."""

import functools
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_UNBROKEN = 10_000  # columns of what is no terminal: a program reads lines, and one that is folded is two


def screen() -> "Console":
    """The console of this process. In a pipe or a file it folds, cuts and colours nothing, unless COLUMNS is set."""
    import rich

    _plainly()
    found = rich.get_console()
    if not found.is_terminal and "COLUMNS" not in os.environ:
        found.width = _UNBROKEN
    return found


def only_data_on_stdout(only: bool = True) -> None:
    """From here on, what people read goes to standard error, so that standard output holds the JSON alone; or not."""
    import rich

    rich.get_console().stderr = only


def duration(seconds: float) -> str:
    """Seconds for people: 3.2 s, 4:05, 1:02:03."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@functools.cache
def _plainly() -> None:
    """Numbers and words are not coloured for what they look like."""
    import rich

    rich.reconfigure(stderr=rich.get_console().stderr, highlight=False)
