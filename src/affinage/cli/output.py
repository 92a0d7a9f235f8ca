"""What verbs print: one result, as text for people or as JSON for scripts; and a progress line while they work."""

import contextlib
import functools
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.filesize import decimal

from affinage.durations import duration
from affinage.errors import plain

if TYPE_CHECKING:
    from rich.console import Console

_UNBROKEN = 10_000  # columns where there is no terminal: a program reads lines, and one that is folded is two
_LONG = 10**12  # numbers from here on, such as FLOPs, are written with an exponent
_EMPTY: tuple[Any, ...] = (None, "", [], {})


@dataclass(frozen=True)
class Table:
    """A table: cells are printed as they are, numbers with separators, None as a dash."""

    columns: Sequence[str]
    rows: Iterable[Sequence[Any]]
    left: Sequence[int] = (0,)  # columns that are aligned to the left


def emit(result: Any, as_json: bool, view: "Iterable[str | Table] | None" = None) -> None:
    """Print a result, a pydantic model or values of JSON: as one JSON document, or as text.

    The text is `view`, lines and tables that are read only then; without one, `described(result)`.
    """
    data = result.model_dump(mode="json") if hasattr(result, "model_dump") else result
    if as_json:
        print(json.dumps(data, ensure_ascii=False, indent=1, default=list))
        return
    for part in described(data) if view is None else view:
        drawn = part if isinstance(part, str) else _drawn(part)
        screen().print(drawn, highlight=False, markup=False, soft_wrap=isinstance(part, str))


def described(data: Any, indent: str = "") -> "Iterator[str | Table]":
    """The text of any result: rows become a table, a mapping a line for each of its keys.

    Keys that end in `bytes`, `seconds` and `flops` have their values with units; empty values are left out.
    """
    if isinstance(data, list):
        yield table(data)
        return
    for key, value in data.items():
        inner = [*value.values()] if isinstance(value, Mapping) else value if isinstance(value, list) else []
        if value in _EMPTY:
            continue
        if inner and all(isinstance(each, Mapping) for each in inner):
            rows = [{"": name, **each} for name, each in value.items()] if isinstance(value, Mapping) else value
            yield f"\n{_title(key)}"
            yield table(rows)
        elif isinstance(value, Mapping) and any(isinstance(each, Mapping | list) for each in inner):
            yield f"{indent}{_title(key)}:"
            yield from described(value, indent + "  ")
        else:
            yield f"{indent}{_title(key)}: {_in_words(key, value)}"


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A table of rows that are mappings, with a column for each key that has a value in any of them.

    Columns of numbers are aligned to the right.
    """
    keys = [*dict.fromkeys(key for row in rows for key, value in row.items() if value not in _EMPTY)]
    cells = [[_in_words(key, row.get(key)) for key in keys] for row in rows]
    left = [at for at in range(len(keys)) if not all(re.match(r"$|[-–$\d]", row[at]) for row in cells)]
    return Table([_title(key) for key in keys], cells, left)


def _title(key: str) -> str:
    return plain(str(key)).removesuffix("_bytes").removesuffix("_seconds").replace("_", " ")


_UNITS: dict[str, Callable[[Any], str]] = {"bytes": decimal, "seconds": duration, "flops": "{:.3g}".format}


def _in_words(key: str, value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "–", True: "yes", False: "no"}[value]
    if isinstance(value, Mapping):
        has_unit = key.endswith((*_UNITS,))
        return ", ".join(f"{plain(str(at))} {_in_words(key if has_unit else at, each)}" for at, each in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_in_words(key, each) for each in value)
    if not isinstance(value, int | float):
        return plain(str(value))
    for ending, form in _UNITS.items():
        if key.endswith(ending):
            return form(value)
    whole = isinstance(value, int) or abs(value) >= 1000
    return f"{value:,.0f}" if whole and abs(value) < _LONG else f"{value:.4g}"


def _drawn(table: Table) -> Any:
    from rich.table import Table as RichTable

    drawn = RichTable(box=None, pad_edge=False, show_header=any(table.columns))
    for place, title in enumerate(table.columns):
        drawn.add_column(title, justify="left" if place in table.left else "right", overflow="fold")
    for row in table.rows:
        drawn.add_row(*(_in_words("", cell) for cell in row))
    return drawn


@functools.cache
def screen() -> "Console":
    """The console of this process. In a pipe or a file it folds, cuts and colors nothing, unless COLUMNS is set."""
    import rich

    rich.reconfigure(stderr=rich.get_console().stderr, highlight=False)
    console = rich.get_console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _UNBROKEN
    return console


@contextlib.contextmanager
def only_data_on_stdout(wanted: bool) -> Iterator[None]:
    """Inside, if wanted, text for people goes to standard error, so that standard output holds the JSON alone."""
    import rich

    console = rich.get_console()
    before, console.stderr = console.stderr, wanted or console.stderr
    try:
        yield
    finally:
        console.stderr = before


def counted(count: int, thing: str) -> str:
    """A number of things, named in the singular: "1 step", "2,000 steps"."""
    return f"{count:,} {thing}" + ("" if count == 1 else "s")


def listed(names: Sequence[str], most: int) -> str:
    """Names with commas, the first ones if there are more than `most`."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


@contextlib.contextmanager
def working(name: str) -> Iterator[Callable[[str], None]]:
    """Show on a terminal, on standard error, what is being done; elsewhere nothing.

    Yields a function that shows a phase in words, such as "30 of 90 choices".
    """
    from rich.console import Console

    with Console(file=sys.stderr).status(f"{name} ...") as status:
        yield lambda phase: status.update(f"{name}: {phase}")
