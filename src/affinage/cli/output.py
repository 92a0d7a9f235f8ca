"""What verbs print: tables and lines for people, plain and in whole lines outside of a terminal; JSON for scripts."""

import contextlib
import functools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

_UNBROKEN = 10_000  # columns where there is no terminal: a program reads lines, and one that is folded is two


@dataclass(frozen=True)
class Table:
    """A table: cells are printed as they are, numbers with separators, None as a dash."""

    columns: Sequence[str]
    rows: Iterable[Sequence[Any]]
    left: Sequence[int] = (0,)  # columns that are aligned to the left
    title: str = ""


def emit(data: Any, as_json: bool, view: "Iterable[str | Table]" = ()) -> None:
    """Print a result: `data` as one JSON document, or else the lines and tables of `view`, which is read only then."""
    if as_json:
        print(json.dumps(data, ensure_ascii=False, indent=1))
        return
    console = screen()
    for part in view:
        if isinstance(part, str):
            console.print(part, highlight=False, markup=False, soft_wrap=True)
        else:
            console.print(_drawn(part), highlight=False, markup=False)


def _drawn(table: Table) -> Any:
    from rich.table import Table as RichTable

    drawn = RichTable(box=None, pad_edge=False, title=table.title or None, title_justify="left")
    drawn.show_header = any(table.columns)
    for place, title in enumerate(table.columns):
        drawn.add_column(title, justify="left" if place in table.left else "right", overflow="fold")
    for row in table.rows:
        drawn.add_row(*map(_cell, row))
    return drawn


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def screen() -> "Console":
    """The console of this process. In a pipe or a file it folds, cuts and colors nothing, unless COLUMNS is set."""
    import rich

    _without_highlights()
    found = rich.get_console()
    if not found.is_terminal and "COLUMNS" not in os.environ:
        found.width = _UNBROKEN
    return found


def counted(count: int, thing: str) -> str:
    """A number of things, named in the singular: "1 step", "2,000 steps"."""
    return f"{count:,} {thing}" + ("" if count == 1 else "s")


def listed(names: Sequence[str], most: int) -> str:
    """Names with commas, the first ones if there are more than `most`."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


@contextlib.contextmanager
def only_data_on_stdout(wanted: bool) -> Iterator[None]:
    """Inside, if wanted, text for people goes to standard error, so that standard output holds the JSON alone."""
    if not wanted:
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
def _without_highlights() -> None:
    import rich

    rich.reconfigure(stderr=rich.get_console().stderr, highlight=False)
