"""Where values that are made of others, such as recipes, are not the same."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def differing(values: Sequence[Any], *, absent: Any = None, key: str = "") -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield the smallest parts that are not the same in all of `values`: (dotted key, the parts).

    Where all values are mappings, or lists of mappings, their parts are compared. `absent` stands for a part that one
    of them does not have; `key` is that of the values themselves.
    """
    if all(value == values[0] for value in values):
        return
    mappings = all(isinstance(value, Mapping) and value for value in values)
    if mappings or all(
        isinstance(value, list) and any(isinstance(each, Mapping) for each in value) for value in values
    ):
        parts = [dict(value) if mappings else dict(enumerate(value)) for value in values]
        for name in dict.fromkeys(name for each in parts for name in each):
            inside = [each.get(name, absent) for each in parts]
            yield from differing(inside, absent=absent, key=f"{key}.{name}" if key else str(name))
    else:
        yield key, tuple(values)
