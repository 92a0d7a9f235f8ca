"""Where the verbs print what people read: coloured on a terminal, plain and in whole lines everywhere else."""

import contextlib
import functools
import os
from collections.abc import Iterator
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


def counted(count: int, thing: str) -> str:
    """So many of a thing, which is in the singular: "1 stage", "2,000 stages"."""
    return f"{count:,} {thing}" + ("" if count == 1 else "s")


@contextlib.contextmanager
def only_data_on_stdout(asked: bool) -> Iterator[None]:
    """Inside, if asked, what people read goes to standard error, so that standard output holds the JSON alone."""
    if not asked:
        yield
        return
    import rich

    console = rich.get_console()
    before, console.stderr = console.stderr, True
    try:
        yield
    finally:
        console.stderr = before


@functools.cache
def _plainly() -> None:
    """Numbers and words are not coloured for what they look like."""
    import rich

    rich.reconfigure(stderr=rich.get_console().stderr, highlight=False)
