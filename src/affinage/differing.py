"""Where values that are made of others, such as recipes, are not the same."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def differing(values: Sequence[Any], *, absent: Any = None, key: str = "") -> Iterator[tuple[str, tuple[Any, ...]]]:
    """The smallest parts that are not the same in all of `values`.

    Args:
        values: mappings and lists of mappings are gone into where all of them are such, lists by position; of what one
            of them lacks, the whole is a part.
        absent: what stands for a part that one of them does not have.
        key: of the values themselves.

    Yields:
        (dotted key as `--set` takes it, the part in each of `values`).
    """
    if all(value == values[0] for value in values):
        return
    if all(isinstance(value, Mapping) and value for value in values):
        parts = [dict(value) for value in values]
    elif all(isinstance(value, list) and any(isinstance(each, Mapping) for each in value) for value in values):
        parts = [dict(enumerate(value)) for value in values]
    else:
        yield key, tuple(values)
        return
    for name in dict.fromkeys(name for each in parts for name in each):
        inside = [each.get(name, absent) for each in parts]
        yield from differing(inside, absent=absent, key=f"{key}.{name}" if key else str(name))
