"""JSON written by stages, read so that a missing, older or broken field is an absent one and never a crash."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def json_file(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if the file is absent or cannot be read as one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines file; a last line cut short by a kill is skipped."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict):
                yield value


def number(value: Any) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def whole(value: Any) -> int | None:
    """A finite number as an int, or None."""
    real = number(value)
    return None if real is None else int(real)


def mapping(value: Any) -> Mapping[str, Any]:
    """A mapping, empty if it is none."""
    return {str(k): v for k, v in value.items()} if isinstance(value, Mapping) else {}


def listing(value: Any) -> list[Any]:
    """A list, empty if it is none."""
    return list(value) if isinstance(value, list | tuple) else []


def mappings(value: Any) -> list[Mapping[str, Any]]:
    """The mappings of a list, empty if it is none."""
    return [mapping(item) for item in listing(value) if isinstance(item, Mapping)]


def string(*values: Any) -> str:
    """The first of the values that is a string with something in it, else ""."""
    return next((value for value in values if isinstance(value, str) and value), "")
